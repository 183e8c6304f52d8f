"""SmolLM2-135M-Instruct on its real weights, against Hugging Face's implementation in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from mini_infer import LLM, SamplingParams
from mini_infer.core.outputs import RequestOutput
from tests.real_prompts import PROMPTS

pytestmark = pytest.mark.real_model

NUM_TOKENS = 48
NUM_COMPARED = 32
OPTIONS = {"max_model_len": 512, "max_num_seqs": len(PROMPTS), "kv_cache_memory": "512MiB"}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def hugging_face(real_model_folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        real_model_folder, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def float32_llm(real_model_folder: Path) -> Iterator[LLM]:
    with LLM(str(real_model_folder), dtype="float32", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def float32_outputs(float32_llm: LLM) -> list[RequestOutput]:
    """All prompts run together."""
    return float32_llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_the_prompts_are_fifty_of_mixed_length(float32_outputs: list[RequestOutput]) -> None:
    lengths = [len(output.prompt_token_ids) for output in float32_outputs]
    assert len(set(PROMPTS)) == 50
    assert min(lengths) == 1
    assert max(lengths) > 128, "none is longer than a chunk"
    assert len(set(lengths)) > 15


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_greedy_tokens_are_hugging_faces(
    index: int, float32_outputs: list[RequestOutput], hugging_face: LlamaForCausalLM
) -> None:
    """One forward over prompt and output: each token is the likeliest after all those before it.

    By induction that is the text which Hugging Face's greedy decoding writes.
    """
    output = float32_outputs[index]
    token_ids = output.outputs[0].token_ids
    assert len(token_ids) == NUM_TOKENS
    sequence = torch.tensor([output.prompt_token_ids + token_ids[:-1]])
    with torch.inference_mode():
        logits = hugging_face(sequence, logits_to_keep=NUM_TOKENS).logits[0]
    assert token_ids == logits.argmax(-1).tolist()


def test_answers_are_those_of_hugging_faces_generate(
    float32_llm: LLM, hugging_face: LlamaForCausalLM
) -> None:
    """The end of the answer too: both stop at the end-of-sequence token, which is the last id."""
    questions = [
        "What is the capital of France?",
        "How many days are in a week? Answer in one sentence.",
        "Write one sentence about the sea.",
        "Say hello.",
    ]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = float32_llm.chat(conversations, params, use_tqdm=False)
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        expected = hugging_face.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=params.max_tokens,
        )
        assert output.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()
    assert "Paris" in outputs[0].outputs[0].text
    assert {output.outputs[0].finish_reason for output in outputs} >= {"stop"}


def test_the_default_dtype_agrees_with_float32(
    real_model_folder: Path, float32_outputs: list[RequestOutput]
) -> None:
    """At least 90 % of the first 32 tokens are the same; docs/performance-notes.md has more."""
    some = slice(0, None, 2)
    params = SamplingParams(temperature=0, max_tokens=NUM_COMPARED, ignore_eos=True)
    with LLM(str(real_model_folder), **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS[some], params, use_tqdm=False)
    agreeing = sum(
        ours == exact
        for output, exact_output in zip(outputs, float32_outputs[some], strict=True)
        for ours, exact in zip(
            output.outputs[0].token_ids,
            exact_output.outputs[0].token_ids[:NUM_COMPARED],
            strict=True,
        )
    )
    assert agreeing >= 0.9 * len(outputs) * NUM_COMPARED


def test_regression_05_a_second_run_comes_from_the_prefix_cache_and_says_the_same(
    float32_llm: LLM, float32_outputs: list[RequestOutput]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    again = float32_llm.generate(PROMPTS, params, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in again) > 200
    for before, after in zip(float32_outputs, again, strict=True):
        assert before.outputs[0].token_ids[:4] == after.outputs[0].token_ids


def test_regression_01_a_stop_string_over_several_tokens(float32_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, stop="DEFGHIJ")
    deltas = list(float32_llm.stream("Here is the English alphabet: ABC", params))
    assert "D" not in "".join(delta.text for delta in deltas)
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason == "DEFGHIJ"
    assert deltas[-1].output is not None
    assert deltas[-1].output.outputs[0].text == "".join(delta.text for delta in deltas)


def test_regression_03_a_stop_inside_a_token(float32_llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=32, stop="Pari")
    deltas = list(float32_llm.stream_chat(question, params))
    text = "".join(delta.text for delta in deltas)
    assert text == "The capital of France is "
    assert deltas[-1].finish_reason == "stop"
