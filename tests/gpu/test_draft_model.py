"""A draft model on a GPU: whatever it says, the tokens stay; and what it sees is what is there."""

import json
from pathlib import Path
from typing import Any

import pytest

from mini_infer.core.outputs import RequestOutput
from mini_infer.core.sampling_params import SamplingParams
from tests.gpu.small_engines import GREEDY, mixed_params, open_llm, prompts, write_config

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True)


def run(folder: Path, **options: Any) -> list[RequestOutput]:
    params = [GREEDY] * len(prompts()) + mixed_params()
    with open_llm(folder, **options) as llm:
        return llm.generate(prompts() * 2, params, use_tqdm=False)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("target"), "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture, and other heads: its kernels are not the target's."""
    folder = write_config(tmp_path_factory.mktemp("draft"), "Qwen3ForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "head_dim": 32, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return token_ids(run(folder))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"depth": 1},
        {"attention_backend": "torch"},
        {"max_num_batched_tokens": 48},
        {"num_kv_blocks": 40},
        {"max_num_seqs": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "fixed"])
def test_another_model_changes_nothing(
    folder: Path,
    other_folder: Path,
    expected: list[list[int]],
    adaptive: bool,
    options: dict[str, Any],
) -> None:
    speculation = {"model": str(other_folder), "num_speculative_tokens": 3, "adaptive": adaptive}
    assert token_ids(run(folder, speculative_config=speculation, **options)) == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"num_kv_blocks": 60}], ids=str)
def test_the_target_itself_is_right(
    folder: Path, params: SamplingParams, options: dict[str, Any]
) -> None:
    """But for the odd near-tie that products of another number of rows decide otherwise."""
    speculation = {"model": str(folder), "num_speculative_tokens": 4, "adaptive": False}
    with open_llm(folder, speculative_config=speculation, **options) as llm:
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(prompts(), params, use_tqdm=False)
            drafts = [output.metrics.drafts for output in outputs]
            proposed = sum(each.num_draft_tokens for each in drafts if each is not None)
            accepted = sum(each.num_accepted_tokens for each in drafts if each is not None)
            assert accepted > 0.97 * proposed > 100
