"""Two GPUs, a rank each: the tokens are one GPU's, and a rank that is killed ends the engine."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer.core.errors import EngineDeadError
from mini_infer.core.sampling_params import SamplingParams
from tests.gpu.small_engines import ARCHITECTURES, generate_all, open_llm, write_config

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"depth": 1, "max_num_batched_tokens": 48},
        {"speculative_config": {"method": "early_exit", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_two_ranks_give_the_same_tokens(folder: Path, options: dict[str, Any]) -> None:
    assert generate_all(folder, tensor_parallel_size=2, **options) == generate_all(folder)


def test_a_rank_that_is_killed_ends_the_engine(folder: Path) -> None:
    llm = open_llm(folder, tensor_parallel_size=2)
    ranks = llm.engine.core.executor.ranks  # type: ignore[attr-defined]
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    begin = time.monotonic()
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 was killed by SIGKILL"):
        list(stream)
    assert time.monotonic() - begin < 10
    assert not ranks.folder.exists()
    llm.shutdown()
