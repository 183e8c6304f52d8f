"""Shapes of log-probabilities that a dry run does not bring about."""

from mini_infer.core.outputs import Logprob
from mini_infer.serving.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs


def logprob(token: bytes, value: float, rank: int = 1) -> Logprob:
    return Logprob(value, rank, token.decode(errors="replace"), tuple(token))


def test_candidates_that_are_spelled_alike_keep_the_tokens_own_value() -> None:
    candidates = {1: logprob(b"\xe6", -3.0, 2), 2: logprob(b"\xe7", -1.0)}
    piece = CompletionLogprobs().add([candidates], 1)
    assert piece["token_logprobs"] == [-3.0]
    assert piece["top_logprobs"] == [{"�": -3.0}]


def test_a_token_outside_the_likeliest_is_added_to_completions_only() -> None:
    candidates = {1: logprob(b"a", -5.0, 9), 2: logprob(b"b", -1.0), 3: logprob(b"c", -2.0, 2)}
    assert CompletionLogprobs().add([candidates], 2)["top_logprobs"] == [
        {"a": -5.0, "b": -1.0, "c": -2.0}
    ]
    [entry] = chat_logprobs([candidates], 2)["content"]
    assert entry["token"] == "a"
    assert [top["token"] for top in entry["top_logprobs"]] == ["b", "c"]


def test_offsets_of_tokens_that_share_characters() -> None:
    """日本 in three tokens: the second ends the first character and begins the next one."""
    data = "日本".encode()
    parts = [b"x", data[:2], data[2:4], data[4:], b"y"]
    counter = CompletionLogprobs()
    pieces = [counter.add([{0: logprob(part, -1.0)}], 0) for part in parts]
    assert [piece["text_offset"] for piece in pieces] == [[0], [1], [1], [2], [3]]


def test_an_echoed_first_token_is_what_the_others_leave() -> None:
    counter = CompletionLogprobs()
    piece = counter.echo("Hello you", [None, {5: logprob(b" you", -2.0)}], 0)
    assert piece["tokens"] == ["Hello", " you"]
    assert piece["text_offset"] == [0, 5]
    assert counter.add([{6: logprob(b"!", -1.0)}], 0)["text_offset"] == [9]


def test_prompt_logprobs_that_were_not_asked_for() -> None:
    assert prompt_logprobs(None) is None
