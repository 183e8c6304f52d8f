"""The engine on a GPU: a steady step never waits, and its results are complete."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mini_infer import SamplingParams
from tests.gpu.small_engines import ARCHITECTURES, mixed_params, open_llm, prompts, write_config


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), request.param)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_steady_decode_step_never_waits_for_the_device(folder: Path, enforce_eager: bool) -> None:
    """Waiting for the event of the step before last is no synchronisation with this one."""
    with open_llm(folder, enforce_eager=enforce_eager) as llm:
        for index, params in enumerate(mixed_params()):
            longer = SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                logprobs=params.logprobs,
                logit_bias=params.logit_bias,
                max_tokens=60,
                ignore_eos=True,
            )
            llm.engine.add_request(str(index), prompts()[index], longer)
        for _ in range(8):
            llm.engine.step()
        with no_synchronisation():
            for _ in range(20):
                llm.engine.step()


def test_admissions_and_long_prompts_never_wait_either(folder: Path) -> None:
    with open_llm(folder, max_num_batched_tokens=64) as llm:
        llm.generate(prompts(), mixed_params(), use_tqdm=False)  # compiles
        with no_synchronisation():
            llm.generate(prompts(), mixed_params(), use_tqdm=False)


def test_a_prompts_log_probabilities_are_there_when_its_chunks_end(folder: Path) -> None:
    """A chunk in the middle of a prompt samples nothing, and yet brings some."""
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    found = []
    for budget in (32, 2048):
        with open_llm(folder, max_num_batched_tokens=budget) as llm:
            outputs = llm.generate(prompts(), params, use_tqdm=False)
        found.append(
            [
                entry[token_id].logprob
                for output in outputs
                for token_id, entry in zip(
                    output.prompt_token_ids, output.prompt_logprobs or [None], strict=True
                )
                if entry is not None
            ]
        )
    assert len(found[0]) == sum(len(prompt) - 1 for prompt in prompts())
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def test_a_cache_sized_by_the_profile_fills_its_share(folder: Path) -> None:
    before, total = torch.cuda.mem_get_info()
    share = 0.3 + (total - before) / total
    with open_llm(folder, num_kv_blocks=None, gpu_memory_utilization=share) as llm:
        llm.generate(prompts(), mixed_params(), use_tqdm=False)
        free, _ = torch.cuda.mem_get_info()
        demand = llm.engine.config.max_num_seqs * llm.engine.config.max_blocks_per_request
        assert llm.engine.config.num_kv_blocks == demand, "no more than all requests could fill"
        assert total - free < share * total
