"""Every architecture against Hugging Face's, over a paged cache and any chunking."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.dummy_source import DummySource
from mini_infer.modeling.weights import build_model
from tests.modeling.driver import PagedDriver
from tests.modeling.fakes import tiny_config
from tests.modeling.hf_models import CASES, TRAINED_LENGTH, hf_model, load, prompt

PROMPT = prompt(21)
NUM_OUTPUT = 24


@dataclass
class Pair:
    """A Hugging Face model and ours, built from the same folder."""

    reference: transformers.PreTrainedModel
    model: CausalLM
    logits: torch.Tensor
    output: list[int]


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = hf_model(request.param)
    reference.save_pretrained(folder)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0]
    return Pair(reference, load(folder, max_model_len=256), logits, hf_greedy(reference, PROMPT))


@torch.no_grad()
def hf_greedy(
    reference: transformers.PreTrainedModel, tokens: tuple[int, ...], count: int = NUM_OUTPUT
) -> list[int]:
    token_ids = torch.tensor([tokens])
    output = reference.generate(
        token_ids,
        # Without it, generate() takes every token 0 of the prompt for padding.
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(tokens) :].tolist()


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 1024])
def test_logits_match_hugging_face_whatever_the_chunking(pair: Pair, chunk_size: int) -> None:
    logits = PagedDriver(pair.model).prefill("a", PROMPT, chunk_size)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, pair.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("chunk_size", "block_size"), [(1024, 16), (3, 1)])
def test_greedy_tokens_are_hugging_faces(pair: Pair, chunk_size: int, block_size: int) -> None:
    output = PagedDriver(pair.model, block_size).greedy(PROMPT, NUM_OUTPUT, chunk_size)
    assert output == pair.output


def test_a_request_in_a_mixed_batch_computes_what_it_computes_alone(pair: Pair) -> None:
    requests = {"a": prompt(13, 1), "b": prompt(9, 2), "c": prompt(17, 3)}
    alone = {
        name: PagedDriver(pair.model).prefill(name, tokens, 1024)
        for name, tokens in requests.items()
    }
    together = PagedDriver(pair.model)
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in requests}
    # Decoding beside prefilling beside not yet begun: a is one token a step, b three, c eight.
    sizes = {"a": 1, "b": 3, "c": 8}
    for step in range(13):
        chunks = [
            (name, requests[name][step * size : (step + 1) * size])
            for name, size in sizes.items()
            if step * size < len(requests[name])
        ]
        for (name, _), rows in zip(chunks, together.step(chunks), strict=True):
            logits[name].append(rows)
    for name, rows in logits.items():
        torch.testing.assert_close(torch.cat(rows), alone[name], atol=1e-5, rtol=0)


def test_the_last_block_computes_wanted_tokens_only(pair: Pair) -> None:
    requests = {"a": prompt(13, 1), "b": prompt(9, 2), "c": prompt(1, 3)}
    chunks = list(requests.items())
    everything = PagedDriver(pair.model).step(chunks)
    driver = PagedDriver(pair.model)
    for rows, (last,) in zip(everything, driver.step(chunks, last_only=True), strict=True):
        torch.testing.assert_close(last, rows[-1], atol=1e-5, rtol=0)
    # The tokens that nobody wanted left their keys and values.
    after = PagedDriver(pair.model)
    after.step(chunks)
    for ours, theirs in zip(driver.step([("a", [5])]), after.step([("a", [5])]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_inference_only(pair: Pair) -> None:
    assert not pair.model.training
    assert not any(parameter.requires_grad for parameter in pair.model.parameters())
    layout = pair.model.kv_layout
    config = pair.model.config
    assert (layout.num_kv_heads, layout.head_dim) == (config.num_kv_heads, config.head_dim)


def test_dynamic_rotary_decodes_past_the_trained_length_as_hugging_face(tmp_path: Path) -> None:
    reference = hf_model("llama-dynamic")
    reference.save_pretrained(tmp_path)
    start = prompt(TRAINED_LENGTH - 6, 4)
    output = PagedDriver(load(tmp_path, max_model_len=256)).greedy(start, 30)
    assert output == hf_greedy(reference, start, 30)


@pytest.mark.parametrize("chunk_size", [1, 7, 1024])
def test_dynamic_rotary_does_not_depend_on_chunking(tmp_path: Path, chunk_size: int) -> None:
    reference = hf_model("llama-dynamic")
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, max_model_len=256)
    tokens = prompt(TRAINED_LENGTH + 40, 5)
    whole = PagedDriver(model).prefill("a", tokens, len(tokens))
    chunked = PagedDriver(model).prefill("a", tokens, chunk_size)
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=0)


WINDOWED = tiny_config(
    "Qwen3ForCausalLM",
    head_dim=12,
    **{"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 5},
)
DUMMY = build_model(WINDOWED, DummySource(WINDOWED, 0, torch.float32), torch.float32)
SPLITS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(splits=st.lists(SPLITS, min_size=1, max_size=4), block_size=st.integers(1, 17))
def test_any_interleaving_computes_what_each_request_computes_alone(
    splits: list[list[int]], block_size: int
) -> None:
    requests = {str(seed): prompt(sum(sizes), seed) for seed, sizes in enumerate(splits)}
    tokens = {name: [token % 64 for token in row] for name, row in requests.items()}
    driver = PagedDriver(DUMMY, block_size, num_blocks=200)
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in tokens}
    for step in range(max(map(len, splits))):
        chunks = []
        for name, sizes in zip(tokens, splits, strict=True):
            if step < len(sizes):
                begin = sum(sizes[:step])
                chunks.append((name, tokens[name][begin : begin + sizes[step]]))
        for (name, _), rows in zip(chunks, driver.step(chunks), strict=True):
            logits[name].append(rows)
    for name, row in tokens.items():
        alone = PagedDriver(DUMMY).prefill(name, row, 64)
        torch.testing.assert_close(torch.cat(logits[name]), alone, atol=1e-5, rtol=0)
