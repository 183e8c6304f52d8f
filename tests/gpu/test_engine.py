"""The engine on a GPU: every switch gives the same tokens, and a steady step never waits."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer import LLM, SamplingParams
from mini_infer.core.outputs import RequestOutput

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = SHAPE | {
        "architectures": [request.param],
        "model_type": ARCHITECTURES[request.param],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"load_format": "dummy", "dtype": "float32", "device": "cuda"}
    limits = {"max_num_seqs": 16, "num_kv_blocks": 600}
    return LLM(str(folder), **(defaults | limits | options))


def prompts() -> list[list[int]]:
    """Mixed lengths, from a single token to several chunks, two of them with a common head."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 15, 16, 17, 40, 100, 130, 200, 3, 64]
    made = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in lengths]
    return [*made, [*made[7][:96], 5, 6, 7]]


def mixed_params() -> list[SamplingParams]:
    """Every kind of row: the graph's sampler and the edits after it."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.6, "seed": 1},
        {"temperature": 1.0, "top_k": 20, "seed": 2},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "min_p": 0.05, "seed": 4},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 5},
        {"temperature": 0.0, "logit_bias": {7: 3.0}},
        {"temperature": 0.0, "logprobs": 4},
        {"temperature": 0.9, "allowed_token_ids": list(range(50)), "seed": 6},
        {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": [3]},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.7, "seed": 7},
    ]
    return [
        SamplingParams(max_tokens=10 + index, ignore_eos=True, **kind)
        for index, kind in enumerate(kinds)
    ]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run(folder: Path, params: SamplingParams | list[SamplingParams], **options: Any) -> list[Any]:
    with open_llm(folder, **options) as llm:
        return tokens(llm.generate(prompts(), params, use_tqdm=False))


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"depth": 1},
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
def test_every_switch_gives_the_same_tokens(folder: Path, options: dict[str, Any]) -> None:
    for params in (GREEDY, mixed_params()):
        assert run(folder, params, **options) == run(folder, params)


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
