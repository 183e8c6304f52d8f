"""A draft head on a GPU: trained there in seconds, and whatever it says, the tokens stay."""

import math
from pathlib import Path
from typing import Any

import pytest

from mini_infer.core.outputs import RequestOutput
from mini_infer.runtime.train_draft import train
from tests.gpu.small_engines import GREEDY, mixed_params, open_llm, prompts, write_config

OPTIONS = {"load_format": "dummy", "device": "cuda", "max_model_len": 128, "max_num_seqs": 16}


def run(folder: Path, **options: Any) -> list[RequestOutput]:
    params = [GREEDY] * len(prompts()) + mixed_params()
    with open_llm(folder, **options) as llm:
        return llm.generate(prompts() * 2, params, use_tqdm=False)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def num_accepted(outputs: list[RequestOutput]) -> int:
    drafts = [output.metrics.drafts for output in outputs]
    return sum(each.num_accepted_tokens for each in drafts if each is not None)


@pytest.fixture(scope="module", params=["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return token_ids(run(folder))


@pytest.fixture(
    scope="module",
    params=[(1, False), (2, False), (2, True)],
    ids=["one layer", "two layers", "parallel"],
)
def head(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("head")
    num_layers, parallel = request.param
    training = {"num_layers": num_layers, "num_draft_tokens": 600, "epochs": 2}
    training |= {"parallel": parallel}
    record = train(output, {"model": str(folder), **OPTIONS}, training, num_tokens=20_000)
    assert all(math.isfinite(loss) for epoch in record.losses for loss in epoch)
    return output


def speculation(head: Path) -> dict[str, Any]:
    return {
        "method": "head",
        "model": str(head),
        "num_speculative_tokens": 3,
        "adaptive": False,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"depth": 1},
        {"attention_backend": "torch"},
        {"max_num_batched_tokens": 48},
        {"num_kv_blocks": 40},
        {"max_model_len": 234},
    ],
    ids=str,
)
def test_a_head_changes_nothing(
    folder: Path, head: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    outputs = run(folder, speculative_config=speculation(head), **options)
    assert token_ids(outputs) == expected


def test_a_graph_drafts_what_launches_draft(folder: Path, head: Path) -> None:
    """As many are accepted, but for near-ties that kernels of other shapes decide otherwise."""
    graphs, eager = (
        num_accepted(run(folder, speculative_config=speculation(head), enforce_eager=eager))
        for eager in (False, True)
    )
    assert eager > 0
    assert abs(graphs - eager) <= max(3, 0.1 * eager)
