"""Several tokens of one step (accepted drafts): where they end a request."""

import pytest

from mini_infer.core.batch import Chunk
from mini_infer.core.events import Event, EventStream, TokensEmitted
from mini_infer.core.outputs import RequestUpdate, StepOutput, TokenLogprobs
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.step_results import apply_chunk_result, end_update

STOP, EOS = 99, 98
PROMPT = [1, 2, 3]


TIME = 7.5


def apply(
    tokens: list[int], max_tokens: int = 5, eos: frozenset[int] = frozenset({EOS}), **params: object
) -> tuple[Request, RequestUpdate, list[Event]]:
    settings = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,), **params)  # type: ignore[arg-type]
    request = Request("a", list(PROMPT), settings, 0, max_tokens, eos_token_ids=eos)
    request.num_in_flight_tokens = 1
    events = EventStream()
    seen: list[Event] = []
    events.subscribe(seen.append)
    logprobs = tuple(TokenLogprobs(token, -0.5, 1) for token in tokens)
    out = StepOutput((tuple(tokens),), (logprobs,))
    update = apply_chunk_result(request, Chunk("a", 0, 0, 3), out, 0, TIME, events)
    assert update is not None
    return request, update, seen


@pytest.mark.parametrize(
    ("tokens", "kept", "reason", "stop_reason"),
    [
        ([10, 11, STOP, 20, 21, 22], 3, "stop", STOP),
        ([10, 11, EOS, 20, 21, 22], 3, "stop", None),
        ([10, 11, 12, 13, 14, STOP], 5, "length", None),
        ([10, 11, 12, 13, STOP, 15], 5, "stop", STOP),
        ([STOP, 11], 1, "stop", STOP),
        ([10, 11, 12, 13], 4, None, None),
        ([10, 11, 12, 13, 14], 5, "length", None),
    ],
)
def test_regression_09_a_stop_or_the_cap_inside_accepted_drafts(
    tokens: list[int], kept: int, reason: str | None, stop_reason: int | None
) -> None:
    request, update, events = apply(tokens)
    assert update.new_token_ids == tuple(tokens[:kept])
    assert (update.finish_reason, update.stop_reason) == (reason, stop_reason)
    assert request.output_token_ids == tokens[:kept]
    assert [logprob.token_id for logprob in update.new_logprobs] == tokens[:kept]
    (emitted,) = events
    assert isinstance(emitted, TokensEmitted)
    assert emitted.token_ids == tuple(tokens[:kept])


def test_min_tokens_pass_over_an_early_stop() -> None:
    _, update, _ = apply([10, STOP, 12, STOP, 14], min_tokens=3)
    assert update.new_token_ids == (10, STOP, 12, STOP)
    assert update.finish_reason == "stop"


def test_ignore_eos_goes_on_to_the_cap_but_not_past_a_stop_token() -> None:
    _, update, _ = apply([10, EOS, 12, 13, 14], ignore_eos=True)
    assert (len(update.new_token_ids), update.finish_reason) == (5, "length")
    _, update, _ = apply([10, EOS, STOP, 13], ignore_eos=True)
    assert (len(update.new_token_ids), update.finish_reason) == (3, "stop")


def test_regression_18_an_unfinished_chunk_says_nothing() -> None:
    request = Request("a", list(PROMPT), SamplingParams(), 0, 5)
    chunk = Chunk("a", 0, 0, 2, samples=False)
    assert apply_chunk_result(request, chunk, StepOutput(((),)), 0, TIME) is None
    assert request.token_ids == PROMPT


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_prompt_logprobs_are_collected_once_over_chunks_and_recomputation(cut: int) -> None:
    """Two chunks, with the first computed again as after a preemption."""
    prompt = [5, 6, 7, 8, 9]
    entries = tuple(TokenLogprobs(token, -1.0, 1) for token in prompt[1:])
    request = Request("a", prompt, SamplingParams(prompt_logprobs=1), 0, 5)
    request.num_in_flight_tokens = 1
    first = Chunk("a", 0, 0, cut, samples=False)
    for _ in range(2):
        apply_chunk_result(request, first, StepOutput(((),), (), (entries[:cut],)), 0, TIME)
    last = Chunk("a", 0, cut, len(prompt) - cut)
    out = StepOutput(((42,),), (), (entries[cut:],))
    update = apply_chunk_result(request, last, out, 0, TIME)
    assert update is not None
    assert update.prompt_logprobs == (None, *entries)


@pytest.mark.parametrize(("asked", "expected"), [(None, None), (0, (None,))])
def test_nothing_predicts_the_only_token_of_a_prompt(
    asked: int | None, expected: tuple[None] | None
) -> None:
    request = Request("a", [5], SamplingParams(prompt_logprobs=asked), 0, 5)
    update = apply_chunk_result(request, Chunk("a", 0, 0, 1), StepOutput(((42,),)), 0, TIME)
    assert update is not None
    assert update.prompt_logprobs == expected


def test_the_times_of_tokens_are_kept_on_the_request_and_in_the_events() -> None:
    request, _, events = apply([10, 11])
    assert (request.first_token_time, request.last_token_time) == (TIME, TIME)
    assert [event.time for event in events] == [TIME]
    request.num_in_flight_tokens = 1
    out = StepOutput(((12,),))
    apply_chunk_result(request, Chunk("a", 0, 4, 1), out, 0, TIME + 1)
    assert (request.first_token_time, request.last_token_time) == (TIME, TIME + 1)


def test_a_request_told_at_its_end_gets_one_update_with_all_its_tokens() -> None:
    request = Request("a", list(PROMPT), SamplingParams(), 0, 3, told_at_end=True)
    request.num_cached_tokens = 2
    updates = []
    for token in (10, 11, 12):
        request.num_in_flight_tokens = 1
        chunk = Chunk("a", 0, len(request.token_ids) - 1, 1)
        out = StepOutput(((token,),))
        updates.append(apply_chunk_result(request, chunk, out, 0, TIME))
    assert updates[:2] == [None, None]
    assert updates[2] == RequestUpdate("a", (10, 11, 12), (), "length", None, 2)


def test_the_end_of_a_request_brings_what_was_not_told_before() -> None:
    for told_at_end, told in ((True, (10, 11)), (False, ())):
        request = Request("a", list(PROMPT), SamplingParams(), 0, 5, told_at_end=told_at_end)
        request.token_ids += [10, 11]
        update = end_update(request, "error", "as told")
        assert update == RequestUpdate("a", told, (), "error", "as told")
