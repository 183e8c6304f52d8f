"""SmolLM2-135M-Instruct on a GPU against the CPU: equal in float32, near in bfloat16."""

from pathlib import Path

import pytest

from mini_infer import LLM, SamplingParams
from mini_infer.core.errors import ModelNotFoundError
from mini_infer.core.outputs import RequestOutput
from mini_infer.modeling.pull import pull
from tests.real_prompts import PROMPTS

pytestmark = pytest.mark.real_model

NUM_TOKENS = 48
NUM_ALTERNATIVES = 5
OPTIONS = {"max_model_len": 512, "max_num_seqs": len(PROMPTS), "kv_cache_memory": "512MiB"}


def generate(folder: Path, device: str, dtype: str) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_ALTERNATIVES
    )
    with LLM(str(folder), device=device, dtype=dtype, **OPTIONS) as llm:
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
    return generate(real_model_folder, "cpu", "float32")


def test_float32_gives_the_cpus_tokens(
    real_model_folder: Path, on_cpu: list[RequestOutput]
) -> None:
    for ours, theirs in zip(generate(real_model_folder, "cuda", "float32"), on_cpu, strict=True):
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
