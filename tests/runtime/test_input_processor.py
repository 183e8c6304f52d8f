"""What a caller sends becomes requests, or an error that says what to change."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidRequestError, PromptTooLongError
from mini_infer.core.model_config import ModelConfig, RopeConfig
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.input_processor import InputProcessor

VOCAB_SIZE = 260
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    eos_token_ids=(7, 9),
)
CONFIG = EngineConfig(
    model_config=MODEL,
    served_model_name="tiny",
    load_format="dummy",
    dtype="float32",
    device="cpu",
    attention_backend="torch",
    max_model_len=64,
    kv_cache_memory=1,
    max_num_seqs=64,
    max_num_batched_tokens=64,
    depth=1,
    distributed_executor_backend="local",
    block_size=4,
)


def processor(**changes: Any) -> InputProcessor:
    return InputProcessor(dataclasses.replace(CONFIG, **changes), ByteTokenizer())


def test_a_text_prompt() -> None:
    processed = processor().process("r", "hi", SamplingParams(max_tokens=5), 3, "tenant")
    assert (processed.prompt, processed.prompt_token_ids) == ("hi", [0x68, 0x69])
    [request] = processed.requests
    assert request.request_id == processed.request_id == "r"
    assert request.token_ids == processed.prompt_token_ids
    assert (request.max_tokens, request.priority, request.cache_salt) == (5, 3, "tenant")
    assert request.eos_token_ids == {7, 9, 257}  # the model's and the tokenizer's
    assert request.params is processed.params


def test_token_ids_and_rendered_templates_get_no_special_tokens() -> None:
    params = SamplingParams()
    processed = processor().process("r", (1, 2), params)
    assert (processed.prompt, processed.prompt_token_ids) == (None, [1, 2])
    rendered = processor().process("r", "<|bos|>a", params, add_special_tokens=False)
    assert (rendered.prompt, rendered.prompt_token_ids) == ("<|bos|>a", [256, 0x61])


def test_regression_17_every_choice_becomes_a_request() -> None:
    params = SamplingParams(n=3, seed=10, stop=["x"])
    processed = processor().process("r", [1], params)
    assert [request.request_id for request in processed.requests] == ["r#0", "r#1", "r#2"]
    assert [request.seed for request in processed.requests] == [10, 11, 12]
    assert all(request.params.stop == ("x",) for request in processed.requests)


def test_regression_16_choices_stand_in_a_fixed_order() -> None:
    first, second = (
        [request.request_id for request in processor().process("r", [1], params).requests]
        for params in [SamplingParams(n=16)] * 2
    )
    assert first == second == [f"r#{index}" for index in range(16)]


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, 2**64 - 1])
def test_any_seed_fits_a_signed_64_bit_integer(seed: int) -> None:
    processed = processor().process("r", [1], SamplingParams(n=2, seed=seed))
    first, second = (request.seed for request in processed.requests)
    assert 0 <= first < 2**63
    assert 0 <= second < 2**63
    assert first != second


def test_unseeded_requests_draw_from_the_engines_seed() -> None:
    def seeds(engine_seed: int) -> list[int]:
        one = processor(seed=engine_seed)
        return [one.process("r", [1], SamplingParams()).requests[0].seed for _ in range(4)]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 8


def test_a_seeded_request_does_not_move_its_neighbours_seed() -> None:
    plain, mixed = processor(), processor()
    mixed.process("other", [1], SamplingParams(seed=42))
    seeds = [one.process("r", [1], SamplingParams()).requests[0].seed for one in (plain, mixed)]
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        processor().process("r", prompt, SamplingParams(), add_special_tokens=False)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, 10**12])
@pytest.mark.parametrize("param", ["prompt", "stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_token_ids_outside_the_vocabulary(param: str, bad: int) -> None:
    prompt = [1, bad] if param == "prompt" else [1]
    values: dict[str, Any] = {
        "stop_token_ids": {"stop_token_ids": [0, bad]},
        "logit_bias": {"logit_bias": {0: 1.0, bad: 1.0}},
        "allowed_token_ids": {"allowed_token_ids": [VOCAB_SIZE - 1, bad]},
    }
    with pytest.raises(InvalidRequestError, match=rf"{bad} is outside.*{VOCAB_SIZE - 1}") as caught:
        processor().process("r", prompt, SamplingParams(**values.get(param, {})))
    assert caught.value.param == param


def test_text_tokens_outside_a_smaller_model_vocabulary() -> None:
    small = dataclasses.replace(MODEL, vocab_size=200)
    with pytest.raises(InvalidRequestError, match="257 is outside"):
        processor(model_config=small).process("r", "a<|eos|>", SamplingParams())
    with pytest.raises(InvalidRequestError, match="bad_words"):
        processor(model_config=small).process("r", [1], SamplingParams(bad_words=["<|eos|>"]))


@pytest.mark.parametrize("prompt", [[1, 1.0], [1, "a"], [None], 5, None, object()])
def test_a_prompt_that_is_neither_text_nor_integers(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="list of token ids") as caught:
        processor().process("r", prompt, SamplingParams())
    assert caught.value.param == "prompt"


def test_token_ids_from_an_array_become_plain_integers() -> None:
    processed = processor().process("r", np.array([1, 2]), SamplingParams())
    assert [type(token_id) for token_id in processed.prompt_token_ids] == [int, int]


@pytest.mark.parametrize("param", ["prompt", "logit_bias", "allowed_token_ids"])
@pytest.mark.parametrize("bad", [True, "5"])
def test_token_ids_that_are_no_integers(param: str, bad: Any) -> None:
    prompt = [1, bad] if param == "prompt" else [1]
    values: dict[str, Any] = {"logit_bias": {bad: 1.0}, "allowed_token_ids": [bad]}
    params = SamplingParams(**{param: values[param]} if param in values else {})
    with pytest.raises(InvalidRequestError) as caught:
        processor().process("r", prompt, params)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", None),
        ("priority", True),
        ("cache_salt", 5),
        ("cache_salt", None),
        ("cache_salt", "\ud800"),
    ],
)
def test_what_would_raise_in_the_scheduler_is_refused_here(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        processor().process("r", "Hello", SamplingParams(), **{name: value})
    assert caught.value.param == name


def test_a_huge_text_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    one = processor()

    def encode(*_: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    limit = 64 * ByteTokenizer.max_chars_per_token
    with pytest.raises(PromptTooLongError, match=rf"{limit + 1} characters.*64 tokens"):
        one.process("r", "x" * (limit + 1), SamplingParams())
    with pytest.raises(AssertionError, match="tokenised"):
        one.process("r", "x" * limit, SamplingParams())


@pytest.mark.parametrize("prompt", ["0123456789", list(b"0123456789")])
@pytest.mark.parametrize(
    ("num_kept", "kept"), [(3, b"789"), (10, b"0123456789"), (99, b"0123456789")]
)
def test_the_last_tokens_of_a_prompt_are_kept(prompt: Any, num_kept: int, kept: bytes) -> None:
    params = SamplingParams(truncate_prompt_tokens=num_kept)
    processed = processor().process("r", prompt, params)
    assert processed.prompt_token_ids == list(kept)
    assert processed.requests[0].token_ids == list(kept)


@pytest.mark.parametrize(
    ("params", "changes", "length"),
    [
        ({"max_tokens": 10}, {}, 54),
        ({"max_tokens": None}, {}, 63),
        ({"max_tokens": None, "min_tokens": 20}, {}, 44),
        ({"max_tokens": 4}, {"num_kv_blocks": 2}, 5),
    ],
)
def test_a_prompt_is_cut_to_the_room_beside_the_output(
    params: dict[str, Any], changes: dict[str, Any], length: int
) -> None:
    params = {"truncate_prompt_tokens": -1, **params}
    processed = processor(**changes).process("r", "x" * 5000, SamplingParams(**params))
    assert len(processed.prompt_token_ids) == length


def test_most_of_a_huge_text_that_is_cut_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def encode(self: ByteTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return list(text.encode())

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    text = "".join(map(chr, range(32, 127))) * 10_000
    processed = processor().process("r", text, SamplingParams(truncate_prompt_tokens=40))
    assert processed.prompt_token_ids == list(text[-40:].encode())
    assert lengths[0] <= (40 + 64) * ByteTokenizer.max_chars_per_token


@pytest.mark.parametrize("length", [64, 65, 1000])
@pytest.mark.parametrize("max_tokens", [1, None])
def test_a_prompt_as_long_as_the_context(length: int, max_tokens: int | None) -> None:
    with pytest.raises(PromptTooLongError, match=rf"{length} tokens.*64 tokens.*by at least"):
        processor().process("r", [1] * length, SamplingParams(max_tokens=max_tokens))


def test_prompt_and_max_tokens_beyond_the_context() -> None:
    with pytest.raises(PromptTooLongError) as caught:
        processor().process("r", [1] * 60, SamplingParams(max_tokens=5))
    assert caught.value.param == "max_tokens"
    for figure in ("60", "5", "65", "64", "at most 4"):
        assert figure in str(caught.value)
    fits = processor().process("r", [1] * 60, SamplingParams(max_tokens=4))
    assert fits.requests[0].max_tokens == 4


def test_without_max_tokens_the_rest_of_the_context_is_allowed() -> None:
    processed = processor().process("r", [1] * 10, SamplingParams(max_tokens=None))
    assert processed.requests[0].max_tokens == 54


def test_min_tokens_beyond_what_is_left() -> None:
    with pytest.raises(PromptTooLongError, match=r"min_tokens is 55.*at most 54"):
        processor().process("r", [1] * 10, SamplingParams(max_tokens=None, min_tokens=55))


def test_regression_07_a_request_that_can_not_fit_the_pool() -> None:
    """Two blocks of four tokens; an output's last token needs no KV."""
    two_blocks = processor(num_kv_blocks=2)
    with pytest.raises(PromptTooLongError, match="KV cache") as caught:
        two_blocks.process("r", [1] * 8, SamplingParams(max_tokens=2))
    assert "8 tokens" in str(caught.value)
    assert two_blocks.process("r", [1] * 8, SamplingParams(max_tokens=1)).requests
    with pytest.raises(PromptTooLongError, match="KV cache"):
        two_blocks.process("r", [1] * 9, SamplingParams(max_tokens=None))
    clipped = two_blocks.process("r", [1] * 5, SamplingParams(max_tokens=None))
    assert clipped.requests[0].max_tokens == 4


def test_bad_words_with_and_without_a_leading_space() -> None:
    params = SamplingParams(bad_words=["no", " no", "x y"])
    [request] = processor().process("r", [1], params).requests
    assert request.bad_words_token_ids == (
        tuple(b"no"),
        tuple(b" no"),
        tuple(b"x y"),
        tuple(b" x y"),
    )


def test_a_bad_word_of_spaces_only() -> None:
    [request] = processor().process("r", [1], SamplingParams(bad_words=["  "])).requests
    assert request.bad_words_token_ids == (tuple(b"  "), tuple(b" "))


@pytest.mark.parametrize(("spaces", "length"), [("", 17), ("", 16), (" ", 10_000)])
def test_a_bad_word_of_too_many_tokens(spaces: str, length: int) -> None:
    """A letter is a token here; the second spelling has a space more than the first."""
    params = SamplingParams(bad_words=["fine", spaces + "x" * length])
    with pytest.raises(InvalidRequestError, match=r"bad_words.*at most 16 tokens") as caught:
        processor().process("r", [1], params)
    assert caught.value.param == "bad_words"
    assert len(str(caught.value)) < 300


def test_a_bad_word_of_as_many_tokens_as_allowed() -> None:
    [request] = processor().process("r", [1], SamplingParams(bad_words=["x" * 15])).requests
    assert list(map(len, request.bad_words_token_ids)) == [15, 16]


def test_a_huge_bad_word_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ByteTokenizer, "encode")
    params = SamplingParams(bad_words=["x" * (16 * ByteTokenizer.max_chars_per_token + 1)])
    with pytest.raises(InvalidRequestError, match="characters"):
        processor().process("r", [1], params)


def test_more_allowed_tokens_than_there_are() -> None:
    everything = SamplingParams(allowed_token_ids=range(VOCAB_SIZE))
    assert processor().process("r", [1], everything).requests
    with pytest.raises(InvalidRequestError, match="more than the vocabulary's") as caught:
        processor().process("r", [1], SamplingParams(allowed_token_ids=[1] * (VOCAB_SIZE + 1)))
    assert caught.value.param == "allowed_token_ids"
