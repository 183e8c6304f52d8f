"""SmolLM2-135M-Instruct on a GPU against the CPU: equal in float32, near in bfloat16."""

from pathlib import Path

import pytest
import torch

from mini_infer import LLM, SamplingParams
from mini_infer.core.errors import ModelNotFoundError
from mini_infer.core.outputs import RequestOutput
from mini_infer.modeling.pull import pull
from tests.real_prompts import PROMPTS as ALL_PROMPTS

pytestmark = pytest.mark.real_model

PROMPTS = ALL_PROMPTS[::4]
NUM_TOKENS = 32
NUM_ALTERNATIVES = 5
LIMITS = {"max_model_len": 512, "max_num_batched_tokens": 256, "kv_cache_memory": "256MiB"}
OPTIONS = LIMITS | {"max_num_seqs": len(PROMPTS)}


def generate(folder: Path, device: str, dtype: str, **options: object) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_ALTERNATIVES
    )
    with LLM(str(folder), device=device, dtype=dtype, **(OPTIONS | options)) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.fixture(scope="module")
def real_model_folder() -> Path:
    """The model, which a machine without a network may lack: nothing else here depends on it."""
    pytest.importorskip("gguf", reason="without the package gguf the model can't be converted")
    try:
        return pull("smollm2-135m")
    except ModelNotFoundError as error:
        pytest.skip(f"the model is not on this machine: {error}")


@pytest.fixture(scope="module")
def on_cpu(real_model_folder: Path) -> list[RequestOutput]:
    """In one thread: where other tests have the processors, those of a product would wait for each
    other, and a step take ten times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return generate(real_model_folder, "cpu", "float32")
    finally:
        torch.set_num_threads(num_threads)


def test_float32_gives_the_cpus_tokens(
    real_model_folder: Path, on_cpu: list[RequestOutput]
) -> None:
    """Launched: bfloat16 has the graphs."""
    outputs = generate(real_model_folder, "cuda", "float32", enforce_eager=True)
    for ours, theirs in zip(outputs, on_cpu, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids, ours.prompt


def test_bfloat16_differs_only_where_both_tokens_were_near(
    real_model_folder: Path, on_cpu: list[RequestOutput]
) -> None:
    """At the first difference each token is among the other's likeliest few."""
    for ours, theirs in zip(generate(real_model_folder, "cuda", "bfloat16"), on_cpu, strict=True):
        a, b = ours.outputs[0], theirs.outputs[0]
        for place, (mine, other) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if mine != other:
                assert a.logprobs is not None
                assert b.logprobs is not None
                assert other in a.logprobs[place], ours.prompt
                assert mine in b.logprobs[place], ours.prompt
                break
