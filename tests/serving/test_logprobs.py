"""Shapes of log-probabilities that a dry run does not bring about."""

from mini_infer.core.outputs import Logprob
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.serving.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from mini_infer.serving.text_offsets import PromptText


def logprob(token: bytes, value: float, rank: int = 1) -> Logprob:
    return Logprob(value, rank, token.decode(errors="replace"), tuple(token))


def completion_logprobs() -> CompletionLogprobs:
    return CompletionLogprobs(PromptText(ByteTokenizer(), "Hello", True), echo=False)


def test_candidates_that_are_spelled_alike_keep_the_tokens_own_value() -> None:
    candidates = {1: logprob(b"\xe6", -3.0, 2), 2: logprob(b"\xe7", -1.0)}
    piece = completion_logprobs().add([candidates], 1)
    assert piece["token_logprobs"] == [-3.0]
    assert piece["top_logprobs"] == [{"�": -3.0}]


def test_a_token_outside_the_likeliest_is_added_to_completions_only() -> None:
    candidates = {1: logprob(b"a", -5.0, 9), 2: logprob(b"b", -1.0), 3: logprob(b"c", -2.0, 2)}
    assert completion_logprobs().add([candidates], 2)["top_logprobs"] == [
        {"a": -5.0, "b": -1.0, "c": -2.0}
    ]
    [entry] = chat_logprobs([candidates], 2)["content"]
    assert entry["token"] == "a"
    assert [top["token"] for top in entry["top_logprobs"]] == ["b", "c"]


def test_prompt_logprobs_that_were_not_asked_for() -> None:
    assert prompt_logprobs(None) is None
