"""Speculation on a GPU: tokens stay, and a steady step never waits for the device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.outputs import RequestOutput
from mini_infer.core.sampling_params import SamplingParams
from tests.gpu.small_engines import GREEDY, mixed_params, open_llm, prompts, write_config
from tests.gpu.test_engine import no_synchronisation

PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "early exit": {"method": "early_exit", "num_layers": 2},
    "some right": {"method": "tests.modeling.half_right:HalfRight", "num_layers": 3},
}
SAMPLED = SamplingParams(temperature=0.8, seed=1, max_tokens=150, ignore_eos=True)
SWITCHES: list[dict[str, Any]] = [
    {},
    {"depth": 1},
    {"depth": 3},
    {"enforce_eager": True},
    {"enforce_eager": True, "depth": 1},
    {"attention_backend": "torch"},
    {"max_num_batched_tokens": 48},
    {"num_kv_blocks": 40},
    {"max_num_seqs": 3},
    {"max_model_len": 234},
]


def speculation(name: str, **changes: Any) -> dict[str, Any]:
    return PROPOSERS[name] | {"num_speculative_tokens": 4, "adaptive": False} | changes


def repeating() -> list[list[int]]:
    """Prompts in which the lookup finds what came before."""
    return [prompt + 2 * [11, 12, 13, 14, 15] for prompt in prompts()]


def run(folder: Path, **options: Any) -> list[RequestOutput]:
    params = [GREEDY] * len(prompts()) + mixed_params()
    with open_llm(folder, **options) as llm:
        return llm.generate(repeating() * 2, params, use_tqdm=False)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def drafts(outputs: list[RequestOutput]) -> tuple[int, int]:
    """Accepted ones, and all."""
    counts = [output.metrics.drafts for output in outputs if output.metrics.drafts is not None]
    accepted = sum(count.num_accepted_tokens for count in counts)
    return accepted, sum(count.num_draft_tokens for count in counts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return token_ids(run(folder))


@pytest.mark.parametrize("options", SWITCHES, ids=str)
@pytest.mark.parametrize("name", PROPOSERS)
def test_the_tokens_are_those_of_plain_decoding(
    folder: Path, expected: list[list[int]], name: str, options: dict[str, Any]
) -> None:
    outputs = run(folder, speculative_config=speculation(name), **options)
    assert token_ids(outputs) == expected
    accepted, proposed = drafts(outputs)
    assert proposed > 100
    if name == "some right":
        assert 0.2 * proposed < accepted < 0.8 * proposed


@pytest.mark.parametrize("num_drafts", [1, 7, 16])
def test_any_number_of_drafts(folder: Path, expected: list[list[int]], num_drafts: int) -> None:
    config = speculation("some right", num_speculative_tokens=num_drafts)
    assert token_ids(run(folder, speculative_config=config)) == expected


@pytest.mark.parametrize("name", PROPOSERS)
def test_numbers_that_adapt_to_what_was_measured(
    folder: Path, expected: list[list[int]], name: str
) -> None:
    config = speculation(name, adaptive=True)
    assert token_ids(run(folder, speculative_config=config)) == expected


def steady() -> Iterator[tuple[list[int], SamplingParams]]:
    """Requests that run for long, each with parameters of its own."""
    for prompt, params in zip(repeating(), mixed_params(), strict=True):
        yield (
            prompt,
            SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                logprobs=params.logprobs,
                logit_bias=params.logit_bias,
                max_tokens=150,
                ignore_eos=True,
            ),
        )


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("name", ["some right", "ngram"])
def test_a_steady_step_never_waits_for_the_device(
    folder: Path, name: str, enforce_eager: bool, edits: bool
) -> None:
    """Where its rows begin, only the device knows: whoever asked would wait."""
    options = {"speculative_config": speculation(name), "enforce_eager": enforce_eager}
    with open_llm(folder, **options) as llm:
        assert llm.engine.config.depth == 2
        for index, (prompt, params) in enumerate(steady()):
            llm.engine.add_request(str(index), prompt, params if edits else SAMPLED)
        for _ in range(8):
            llm.engine.step()
        with no_synchronisation():
            for _ in range(20):
                llm.engine.step()


def test_admissions_among_speculating_requests_never_wait_either(folder: Path) -> None:
    options = {"speculative_config": speculation("early exit"), "max_num_batched_tokens": 64}
    with open_llm(folder, **options) as llm:
        llm.generate(repeating(), mixed_params(), use_tqdm=False)  # compiles
        with no_synchronisation():
            llm.generate(repeating(), mixed_params(), use_tqdm=False)


def test_a_proposer_that_asks_the_host_runs_without_graphs_only(
    folder: Path, expected: list[list[int]]
) -> None:
    config = speculation("some right", method="tests.modeling.half_right:AsksTheHost")
    with pytest.raises(InvalidConfigError, match="AsksTheHost can't be recorded"):
        run(folder, speculative_config=config)
    assert token_ids(run(folder, speculative_config=config, enforce_eager=True)) == expected
