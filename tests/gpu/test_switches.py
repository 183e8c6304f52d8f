"""The engine on a GPU: every switch gives the same tokens."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.small_engines import ARCHITECTURES, generate_all, write_config


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return generate_all(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"depth": 1},
        {"depth": 5},
        {"attention_backend": "torch"},
        {"max_num_batched_tokens": 48},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 40},
        {"block_size": 8, "num_kv_blocks": 1200},
        {"max_num_seqs": 3},
        {"max_model_len": 240},
    ],
    ids=str,
)
def test_every_switch_gives_the_same_tokens(
    folder: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    assert generate_all(folder, **options) == expected
