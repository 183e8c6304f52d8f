"""Updates become deltas and outputs: text, stops, log-probabilities, metrics, memory."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.events import (
    ChunkScheduled,
    EventStream,
    Finished,
    Preempted,
    Queued,
    StepCompleted,
    TokensEmitted,
)
from mini_infer.core.outputs import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestOutput,
    RequestUpdate,
    TokenLogprobs,
)
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.input_processor import ProcessedRequest
from mini_infer.runtime.output_processor import OutputProcessor

TOKENIZER = ByteTokenizer()
EOS = 257
PROMPT = list(b"ask")


class Bench:
    """An output processor, a clock set by hand, and what came out so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = EventStream(clock=lambda: self.now)
        self.processor = OutputProcessor(TOKENIZER, self.events)
        self.deltas: list[RequestDelta] = []
        self.stopped: list[tuple[str, str]] = []

    def add(self, request_id: str = "r", prompt: str | None = "ask", **params: Any) -> list[str]:
        sampling = SamplingParams(**{"max_tokens": 100, **params})
        ids = [request_id]
        if sampling.n > 1:
            ids = [f"{request_id}#{index}" for index in range(sampling.n)]
        requests = [Request(item, PROMPT, sampling, seed=0, max_tokens=100) for item in ids]
        self.processor.add(ProcessedRequest(request_id, prompt, PROMPT, sampling, requests))
        return ids

    def update(
        self,
        tokens: str | Sequence[int],
        finish: FinishReason | None = None,
        request_id: str = "r",
        **fields: Any,
    ) -> list[RequestDelta]:
        ids = tuple(tokens.encode()) if isinstance(tokens, str) else tuple(tokens)
        outputs = self.processor.process(
            [RequestUpdate(request_id, ids, finish_reason=finish, **fields)]
        )
        self.deltas += outputs.deltas
        self.stopped += outputs.stopped
        return outputs.deltas

    @property
    def texts(self) -> list[str]:
        return [delta.text for delta in self.deltas]

    @property
    def output(self) -> RequestOutput:
        output = self.deltas[-1].output
        assert output is not None
        return output

    @property
    def choice(self) -> CompletionOutput:
        return self.output.outputs[0]

    def assert_empty(self) -> None:
        assert self.processor.num_unfinished == 0
        assert not self.processor._choices
        assert not self.processor._parents


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


def entry(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1 + len(top), top)


def test_log_probabilities(bench: Bench) -> None:
    bench.add(logprobs=2)
    a, b = ord("a"), ord("b")
    bench.update([a], new_logprobs=(entry(a, -1.5, (0xC3, -0.5), (b, -1.0), (a, -1.5)),))
    [shown] = bench.deltas[0].logprobs
    assert list(shown) == [a, 0xC3, b]  # the sampled one, then the two likeliest
    assert (shown[a].logprob, shown[a].rank, shown[a].decoded_token) == (-1.5, 4, "a")
    assert (shown[0xC3].rank, shown[0xC3].bytes) == (1, (0xC3,))
    assert shown[0xC3].decoded_token == "\ufffd"
    assert shown[b].rank == 2
    bench.update([b, EOS], "stop", new_logprobs=(entry(b, -0.25, (b, -0.25)), entry(EOS, -0.25)))
    assert bench.choice.cumulative_logprob == pytest.approx(-2.0)
    assert bench.choice.logprobs is not None
    assert [next(iter(position)) for position in bench.choice.logprobs] == bench.choice.token_ids
    assert list(bench.choice.logprobs[1]) == [b]  # sampled and likeliest: one entry
    assert bench.choice.logprobs[2][EOS].decoded_token == "<|eos|>"


def test_log_probabilities_of_the_sampled_token_only(bench: Bench) -> None:
    bench.add(logprobs=0)
    bench.update("a", new_logprobs=(entry(ord("a"), -1.0, (ord("b"), -0.5)),))
    assert list(bench.deltas[0].logprobs[0]) == [ord("a")]


def test_log_probabilities_are_cut_with_the_tokens(bench: Bench) -> None:
    bench.add(logprobs=0, stop=["."])
    bench.update("a.b", new_logprobs=tuple(entry(token, -1.0) for token in b"a.b"))
    assert len(bench.deltas[0].logprobs) == len(bench.deltas[0].token_ids) == 2
    assert bench.choice.cumulative_logprob == -2.0


def test_prompt_log_probabilities_come_once(bench: Bench) -> None:
    first, second = bench.add(n=2, prompt_logprobs=1)
    prompt = (None, entry(PROMPT[1], -2.0, (65, -1.0), (66, -1.5)), entry(PROMPT[2], -3.0))
    for child in (first, second):
        bench.update("x", "length", request_id=child, prompt_logprobs=prompt)
    shown = bench.deltas[0].prompt_logprobs
    assert shown is not None
    assert [position and list(position) for position in shown] == [
        None,
        [PROMPT[1], 65],
        [PROMPT[2]],
    ]
    assert bench.deltas[1].prompt_logprobs is None
    assert bench.output.prompt_logprobs == shown


def test_prompt_log_probabilities_nobody_asked_for(bench: Bench) -> None:
    bench.add()
    bench.update("x", prompt_logprobs=(None, entry(1, -1.0)))
    assert bench.deltas[0].prompt_logprobs is None


def test_metrics_come_from_the_events(bench: Bench) -> None:
    bench.now = 1.0
    bench.add()
    for event in (
        Queued(2.0, "r", 3),
        ChunkScheduled(3.0, "r", 0, 0, 2),
        Preempted(4.0, "r", 2),
        ChunkScheduled(5.0, "r", 1, 0, 3),
        TokensEmitted(6.0, "r", (1,), 1),
        TokensEmitted(7.0, "r", (1,), 2),
        TokensEmitted(8.0, "unknown", (1,), 2),
        StepCompleted(8.0, 1, 1, 0, 1, 0, 1, 8),
        Finished(9.0, "r", "length", 3, 2),
    ):
        bench.events.emit(event)
    bench.now = 10.0
    bench.update("aa", "length")
    metrics = bench.output.metrics
    assert metrics.queued_time == 2.0
    assert metrics.first_scheduled_time == 3.0
    assert (metrics.first_token_time, metrics.last_token_time) == (6.0, 7.0)
    assert metrics.time_to_first_token == 4.0
    assert metrics.finished_time == 9.0
    assert metrics.num_preemptions == 1


def test_metrics_of_choices_are_their_requests(bench: Bench) -> None:
    first, second = bench.add(n=2)
    for event in (
        Queued(1.0, first, 3),
        Queued(2.0, second, 3),
        TokensEmitted(3.0, second, (1,), 1),
        TokensEmitted(4.0, first, (1,), 1),
        Finished(5.0, first, "length", 3, 1),
    ):
        bench.events.emit(event)
    bench.update("a", "length", request_id=first)
    bench.now = 6.0
    deltas = bench.processor.abort("r")
    assert deltas[0].output is not None
    metrics = deltas[0].output.metrics
    assert (metrics.queued_time, metrics.first_token_time, metrics.finished_time) == (1.0, 3.0, 6.0)


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
