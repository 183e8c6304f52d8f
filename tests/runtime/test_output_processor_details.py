"""Log-probabilities and metrics that come with an output."""

import pytest

from mini_infer.core.events import (
    Admitted,
    Answered,
    DraftsVerified,
    Event,
    Finished,
    Preempted,
    Queued,
    Resumed,
    StepCompleted,
)
from mini_infer.core.outputs import FinishReason, TokenLogprobs
from tests.runtime.output_bench import EOS, PROMPT, Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


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


def test_prompt_log_probabilities_come_once_without_a_stream_too(bench: Bench) -> None:
    children = bench.add(n=2, prompt_logprobs=0, stream=False)
    for child in reversed(children):
        prompt = (None, entry(PROMPT[1], -2.0), entry(PROMPT[2], -3.0))
        bench.update("x", request_id=child, prompt_logprobs=prompt)
    for child in children:
        bench.update("y", "length", request_id=child)
    assert [delta.prompt_logprobs is None for delta in bench.deltas] == [False, True]
    assert bench.output.prompt_logprobs == bench.deltas[0].prompt_logprobs


def test_prompt_log_probabilities_nobody_asked_for(bench: Bench) -> None:
    bench.add()
    bench.update("x", prompt_logprobs=(None, entry(1, -1.0)))
    assert bench.deltas[0].prompt_logprobs is None


def test_metrics_come_from_the_events_and_the_times_of_tokens_from_the_updates(
    bench: Bench,
) -> None:
    bench.now = 1.0
    bench.add()
    for event in (
        Queued(2.0, "r", 3),
        Admitted(3.0, "r", 3, 0),
        Preempted(4.0, "r", 2),
        Resumed(5.0, "r", 0),
        Queued(8.0, "unknown", 3),
        StepCompleted(8.0, 1, 1, 0, 1, 0, 1, 8),
        Finished(9.0, "r", "length", 3, 2),
    ):
        bench.events.emit(event)
    bench.now = 10.0
    bench.update("a", time=6.0)
    bench.update("a", "length", time=7.0)
    metrics = bench.output.metrics
    assert metrics.queued_time == 2.0
    assert metrics.first_scheduled_time == 3.0
    assert (metrics.first_token_time, metrics.last_token_time) == (6.0, 7.0)
    assert metrics.time_to_first_token == 4.0
    assert metrics.finished_time == 9.0
    assert metrics.num_preemptions == 1
    bench.assert_empty()


def test_metrics_of_choices_are_their_requests(bench: Bench) -> None:
    first, second = bench.add(n=2)
    for event in (
        Queued(1.0, first, 3),
        Queued(2.0, second, 3),
        Admitted(2.5, first, 3, 0),
        Admitted(2.75, second, 3, 0),
        Finished(5.0, first, "length", 3, 1),
    ):
        bench.events.emit(event)
    bench.update("a", request_id=second, time=3.0)
    bench.update("a", request_id=first, time=4.0)
    bench.update("a", "length", request_id=first, time=4.5)
    bench.now = 6.0
    deltas = bench.processor.abort("r")
    assert deltas[0].output is not None
    metrics = deltas[0].output.metrics
    assert (metrics.queued_time, metrics.first_scheduled_time) == (1.0, 2.5)
    assert (metrics.first_token_time, metrics.last_token_time) == (3.0, 4.5)
    assert metrics.finished_time == 6.0


def test_metrics_count_the_drafts_of_all_choices(bench: Bench) -> None:
    first, second = bench.add(n=2, stop=["."])
    for event in (
        DraftsVerified(1.0, first, 3, 2, 0.5, 1.5),
        DraftsVerified(1.0, second, 1, 0, 0.25, 0.25),
        DraftsVerified(2.0, second, 2, 2, 0.25, 0.75),
        DraftsVerified(2.0, "unknown", 9, 9),
    ):
        bench.events.emit(event)
    bench.update("ab.", request_id=first)  # ends it before the scheduler knows
    bench.update("abcd", "length", request_id=second)
    drafts = bench.output.metrics.drafts
    assert drafts is not None
    assert (drafts.num_verifications, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (
        3,
        6,
        4,
    )
    assert (drafts.proposed, drafts.accepted) == ([3, 2, 1], [2, 2, 0])
    assert drafts.mean_accepted_length == 1 + 4 / 3
    assert drafts.speedup == 2.5


def test_metrics_without_speculation_have_no_drafts(bench: Bench) -> None:
    bench.add()
    bench.update("a", "length")
    assert bench.output.metrics.drafts is None


def test_metrics_of_a_request_that_is_told_at_its_end_come_with_its_end(bench: Bench) -> None:
    bench.add(stream=False)
    bench.events.emit(Finished(9.0, "r", "length", 3, 2, 6.0, 7.0))
    bench.update("aa", "length")
    metrics = bench.output.metrics
    assert (metrics.first_token_time, metrics.last_token_time) == (6.0, 7.0)
    assert metrics.finished_time == 9.0


def test_metrics_of_a_request_that_ends_before_its_first_token(bench: Bench) -> None:
    bench.add()
    bench.processor.abort("r")
    bench.add()
    [delta] = bench.processor.abort("r")
    assert delta.output is not None
    metrics = delta.output.metrics
    assert metrics.first_token_time is metrics.last_token_time is None
    assert metrics.time_to_first_token is None


@pytest.mark.parametrize(
    ("text", "finish", "told"),
    [("a.", "length", "stop"), ("a.", None, "stop"), ("ab", "length", "length")],
)
def test_the_reason_that_the_caller_is_told_is_an_event(
    bench: Bench, text: str, finish: FinishReason | None, told: FinishReason
) -> None:
    """The last token that is allowed may complete a stop string, which the scheduler can't see."""
    seen: list[Event] = []
    bench.events.subscribe(seen.append)
    bench.add(stop=["."])
    bench.update(text[0])
    bench.update(text[1], finish)
    assert bench.choice.finish_reason == told
    assert seen == [Answered(0.0, "r", told)]


def test_each_choice_is_answered_once(bench: Bench) -> None:
    seen: list[Event] = []
    bench.events.subscribe(seen.append)
    first, second = bench.add(n=2)
    bench.update("a", "length", request_id=second)
    bench.processor.abort("r")
    bench.update("a", "length", request_id=first)
    assert seen == [Answered(0.0, second, "length"), Answered(0.0, first, "abort")]
    bench.assert_empty()
