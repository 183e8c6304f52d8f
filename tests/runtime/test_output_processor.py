"""Updates become deltas and outputs: text, stop strings and tokens, choices, memory."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.outputs import CompletionOutput, FinishReason, TokenLogprobs
from tests.runtime.output_bench import EOS, PROMPT, TOKENIZER, Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_deltas_add_up_to_the_output(bench: Bench) -> None:
    bench.add()
    bench.update("he")
    bench.update("llo", "length", num_cached_tokens=2)
    assert bench.texts == ["he", "llo"]
    assert [delta.token_ids for delta in bench.deltas] == [tuple(b"he"), tuple(b"llo")]
    assert [delta.finish_reason for delta in bench.deltas] == [None, "length"]
    assert bench.deltas[0].output is None
    output = bench.output
    assert output.finished
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "ask", PROMPT)
    assert (bench.choice.text, bench.choice.token_ids) == ("hello", list(b"hello"))
    assert (bench.choice.finish_reason, bench.choice.stop_reason) == ("length", None)
    assert (output.num_cached_tokens, bench.deltas[1].num_cached_tokens) == (2, 2)
    assert {delta.num_prompt_tokens for delta in bench.deltas} == {3}
    assert bench.choice.logprobs is bench.choice.cumulative_logprob is None
    bench.assert_empty()


def test_nothing_new_gives_no_delta(bench: Bench) -> None:
    bench.add()
    assert bench.update("") == []
    assert bench.update("", "length")[0].output is not None


def test_tokens_without_text_give_a_delta(bench: Bench) -> None:
    bench.add()
    assert [delta.token_ids for delta in bench.update([0xC3])] == [(0xC3,)]
    assert [delta.text for delta in bench.update([0xA9])] == ["\xe9"]


def test_regression_01_stop_string_spans_tokens(bench: Bench) -> None:
    bench.add(stop=["DEFGHIJ"])
    for tokens in ("DE", "FG", "HI"):
        assert bench.update(tokens)[0].text == ""
    bench.update("JK")
    assert bench.stopped == [("r", "DEFGHIJ")]
    assert (bench.choice.text, bench.choice.finish_reason) == ("", "stop")
    assert bench.choice.stop_reason == "DEFGHIJ"
    assert bench.choice.token_ids == list(b"DEFGHIJ")  # what came after is dropped
    assert bench.deltas[-1].token_ids == (ord("J"),)
    bench.assert_empty()


def test_regression_02_deltas_equal_the_whole_text(bench: Bench) -> None:
    bench.add(stop=["\n", "Alice:"])
    bench.update(" Alice")
    bench.update("!")
    bench.update("?")
    bench.update("\n")
    assert bench.texts == [" ", "Alice!", "?", ""]
    assert bench.choice.text == " Alice!?"


def test_regression_02_text_held_back_at_the_end_is_delivered(bench: Bench) -> None:
    bench.add(stop=["Alice:"])
    bench.update(" Ali")
    bench.update("ce", "length")
    assert bench.texts == [" ", "Alice"]
    assert bench.choice.text == " Alice"


def test_regression_03_stop_inside_a_token(bench: Bench) -> None:
    bench.add(stop=["Pari"])
    bench.update("is")
    bench.update(" Paris")
    assert bench.choice.text == "is "
    assert bench.stopped == [("r", "Pari")]


def test_regression_04_an_incomplete_character_is_flushed_once(bench: Bench) -> None:
    bench.add()
    bench.update([0x61, 0xF0, 0x9F])
    bench.update([0x9A], "length")
    assert bench.texts == ["a", "\ufffd"]
    assert bench.choice.text == TOKENIZER.decode(bench.choice.token_ids)


def test_regression_09_stop_string_inside_accepted_drafts(bench: Bench) -> None:
    bench.add(stop=["."])
    [delta] = bench.update("ab.cd", "length")
    assert (delta.text, delta.token_ids) == ("ab", tuple(b"ab."))
    assert (delta.finish_reason, delta.stop_reason) == ("stop", ".")
    assert bench.stopped == []  # the scheduler has ended it already


def test_an_included_stop_string(bench: Bench) -> None:
    bench.add(stop=["END"], include_stop_str_in_output=True)
    bench.update("xEN")
    bench.update("Dy")
    assert bench.texts == ["xEN", "D"]
    assert bench.choice.text == "xEND"


@pytest.mark.parametrize(
    ("token", "reason", "params", "text"),
    [
        (EOS, None, {}, "a"),
        (EOS, None, {"skip_special_tokens": False}, "a"),
        (EOS, None, {"include_stop_str_in_output": True}, "a"),
        (
            EOS,
            None,
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            "a<|eos|>",
        ),
        (ord("!"), ord("!"), {"stop_token_ids": [ord("!")]}, "a"),
        (
            ord("!"),
            ord("!"),
            {"stop_token_ids": [ord("!")], "include_stop_str_in_output": True},
            "a!",
        ),
    ],
)
def test_a_stop_token_is_in_the_ids_and_not_in_the_text(
    bench: Bench, token: int, reason: int | None, params: dict[str, Any], text: str
) -> None:
    bench.add(**params)
    bench.update([ord("a"), token], "stop", stop_reason=reason)
    assert bench.choice.token_ids == [ord("a"), token]
    assert (bench.choice.text, bench.choice.finish_reason) == (text, "stop")
    assert bench.choice.stop_reason == reason


def test_special_tokens_in_the_text(bench: Bench) -> None:
    bench.add("skipped")
    bench.add("shown", skip_special_tokens=False)
    assert bench.update([258, 0x61], request_id="skipped")[0].text == "a"
    assert bench.update([258, 0x61], request_id="shown")[0].text == "<|im_start|>a"


def test_min_tokens_hold_stop_strings_off(bench: Bench) -> None:
    bench.add(stop=["b"], min_tokens=3)
    bench.update("abb")
    assert bench.stopped == []
    bench.update("cb")
    assert bench.choice.text == "abbc"


def test_regression_17_choices_are_told_apart(bench: Bench) -> None:
    first, second = bench.add(n=2, stop=["."])
    bench.update("a", request_id=second, num_cached_tokens=16)
    bench.update("b", request_id=first)
    bench.update("x.", request_id=second)
    assert [(delta.request_id, delta.index) for delta in bench.deltas] == [
        ("r", 1),
        ("r", 0),
        ("r", 1),
    ]
    assert bench.deltas[-1].finish_reason == "stop"
    assert bench.deltas[-1].output is None
    assert bench.stopped == [(second, ".")]
    assert bench.processor.unfinished_choices("r") == [first]
    bench.update([0x63, EOS], "stop", request_id=first)
    assert [choice.text for choice in bench.output.outputs] == ["bc", "ax"]
    assert [choice.index for choice in bench.output.outputs] == [0, 1]
    assert bench.output.num_cached_tokens == 0  # the first choice's: the second hit the first
    bench.assert_empty()


def test_updates_after_the_end_are_ignored(bench: Bench) -> None:
    bench.add(stop=["."])
    bench.update(".")
    assert bench.update("more") == []
    assert bench.update("x", request_id="unknown") == []


def test_regression_11_abort_ends_every_running_choice(bench: Bench) -> None:
    first, second = bench.add(n=2, stop=["Alice"])
    bench.update("done", "length", request_id=first)
    bench.update("x Al", request_id=second)
    deltas = bench.processor.abort("r")
    assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
        (1, "Al", "abort")
    ]
    assert deltas[0].output is not None
    assert [choice.text for choice in deltas[0].output.outputs] == ["done", "x Al"]
    assert bench.processor.abort("r") == []
    assert bench.processor.abort("unknown") == []
    bench.assert_empty()


def test_a_failed_request_ends_with_its_message(bench: Bench) -> None:
    bench.add()
    bench.update("a")
    bench.update("", "error", stop_reason="out of memory")
    assert (bench.choice.finish_reason, bench.choice.stop_reason) == ("error", "out of memory")


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab\n\xe9\U0001f600", max_size=20),
    stops=st.lists(st.text(alphabet="ab\n\xe9", min_size=1, max_size=4), max_size=2),
    step=st.integers(1, 6),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_tokens_per_step_do_not_matter(
    text: str, stops: list[str], step: int, include: bool, min_tokens: int
) -> None:
    """One token a step, or several (accepted drafts): same text, ids and reason; deltas join."""
    ids = tuple(text.encode())

    def run(size: int) -> CompletionOutput:
        bench = Bench()
        bench.add(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
        for start in range(0, len(ids), size):
            bench.update(ids[start : start + size])
        if bench.processor.num_unfinished:
            bench.update("", "length")
        assert "".join(bench.texts) == bench.choice.text
        joined = [token for delta in bench.deltas for token in delta.token_ids]
        assert joined == bench.choice.token_ids
        return bench.choice

    assert run(step) == run(1)


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size + 1), max_size=30),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3), max_size=1),
    reason=st.sampled_from(["length", "stop", "abort", "error"]),
    skip=st.booleans(),
    include=st.booleans(),
)
def test_a_request_that_is_not_streamed_has_the_same_output_in_one_delta(
    ids: list[int], stops: list[str], reason: FinishReason, skip: bool, include: bool
) -> None:
    params = {
        "stop": stops,
        "skip_special_tokens": skip,
        "include_stop_str_in_output": include,
    }
    streamed = Bench()
    streamed.add(**params)
    for token_id in ids[:-1]:
        streamed.update([token_id])
    if streamed.processor.num_unfinished:
        streamed.update(ids[-1:], reason)

    quiet = Bench()
    quiet.add(stream=False, **params)
    if stops:  # the scheduler tells each token: one may complete a stop string
        for token_id in ids[:-1]:
            quiet.update([token_id])
        if quiet.processor.num_unfinished:
            quiet.update(ids[-1:], reason)
    else:
        quiet.update(ids, reason)
    [delta] = quiet.deltas
    assert delta.text == quiet.choice.text == streamed.choice.text
    assert list(delta.token_ids) == quiet.choice.token_ids == streamed.choice.token_ids
    assert delta.finish_reason == quiet.choice.finish_reason == streamed.choice.finish_reason
    assert delta.stop_reason == streamed.choice.stop_reason
    assert quiet.stopped == streamed.stopped
    quiet.assert_empty()


def test_an_aborted_request_that_was_told_at_its_end_keeps_its_tokens(bench: Bench) -> None:
    bench.add(stream=False)
    bench.requests["r"].told_at_end = True
    bench.requests["r"].token_ids += b"done"
    [delta] = bench.processor.abort("r")
    assert (delta.text, delta.token_ids) == ("done", tuple(b"done"))
    assert (bench.processor.abort("r"), delta.finish_reason) == ([], "abort")


def test_choices_that_are_not_streamed_have_a_delta_each(bench: Bench) -> None:
    first, second = bench.add(n=2, stream=False, logprobs=0)
    for name in (second, first):
        bench.update("a", request_id=name, new_logprobs=(TokenLogprobs(97, -0.5, 1),))
    assert bench.deltas == []
    for name in (second, first):
        bench.update("b", "length", name, new_logprobs=(TokenLogprobs(98, -0.5, 1),))
    assert [(delta.index, delta.text) for delta in bench.deltas] == [(1, "ab"), (0, "ab")]
    assert [len(delta.logprobs) for delta in bench.deltas] == [2, 2]
    assert [choice.text for choice in bench.output.outputs] == ["ab", "ab"]
    bench.assert_empty()
