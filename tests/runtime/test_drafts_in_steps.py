"""Which drafts the scheduler plans, where a device proposes and how many are right is told."""

from collections.abc import Sequence
from typing import Any

import pytest

from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.core.events import EventStream
from mini_infer.core.outputs import StepOutput
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS, SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.places import Places
from mini_infer.runtime.scheduler import Scheduler
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.host_drafts import HostDrafts
from tests.runtime.fake_executor import make_config

MOST = 4


class Loops:
    """A host's proposer that says each request's last token again."""

    def __init__(self, config: SpeculativeConfig) -> None:
        pass

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        return [request.token_ids[-1:] * num_drafts for request in requests]


def make_scheduler(on_device: bool = True, adaptive: bool = False, **options: Any) -> Scheduler:
    speculation = SpeculativeConfig(
        method="early_exit" if on_device else f"{__name__}:Loops",
        num_speculative_tokens=MOST,
        adaptive=adaptive,
        on_device=on_device,
    )
    defaults = {"num_kv_blocks": 2048, "max_model_len": 1024, "max_num_seqs": 128}
    config = make_config(speculative_config=speculation, **(defaults | options))
    costs = StepCosts((1,), (0, MOST), ((1.0, 1.1),), ((0.0, 0.1),))
    return Scheduler(config, config.num_kv_blocks or 0, EventStream(), costs=costs)


def add(scheduler: Scheduler, name: str, prompt: int = 2, max_tokens: int = 400) -> Request:
    request = Request(name, [5] * prompt, SamplingParams(), seed=0, max_tokens=max_tokens)
    scheduler.add(request)
    return request


def result_of(batch: ScheduledBatch, num_right: int = MOST) -> StepOutput:
    def sampled(chunk: Chunk) -> tuple[int, ...]:
        return (5,) * (1 + min(num_right, chunk.num_drafts)) if chunk.samples else ()

    return StepOutput(tuple(map(sampled, batch.chunks)))


def step(scheduler: Scheduler, num_right: int = MOST) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, result_of(batch, num_right))
    return batch


def test_drafts_that_fill_a_step_are_followed_by_as_many() -> None:
    """What a step may verify once limited what it had proposed, too: every second had none."""
    scheduler = make_scheduler(max_num_batched_tokens=60)
    for index in range(12):
        add(scheduler, str(index))
    batches = [step(scheduler) for _ in range(8)]
    for batch in batches[2:]:
        assert {(chunk.num_drafts, chunk.num_proposed) for chunk in batch.chunks} == {(4, 4)}
        assert batch.num_tokens == 60


@pytest.mark.parametrize("on_device", [True, False])
def test_prompts_are_not_kept_waiting_by_drafts_that_fill_every_step(on_device: bool) -> None:
    scheduler = make_scheduler(on_device, max_num_batched_tokens=60)
    for index in range(12):
        add(scheduler, str(index))
    for _ in range(4):
        step(scheduler)
    prompt = add(scheduler, "prompt", prompt=200)
    for _ in range(9):
        assert step(scheduler).num_tokens <= 60
    assert prompt.num_output_tokens > 0


def test_who_can_not_enter_takes_no_drafts_from_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=60, max_num_seqs=12)
    for index in range(13):
        add(scheduler, str(index))
    batches = [step(scheduler) for _ in range(5)]
    assert {chunk.num_drafts for chunk in batches[-1].chunks} == {4}


def test_drafts_left_of_a_smaller_step_are_dropped_in_one_of_too_many_rows() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=512)
    for index in range(MAX_SPECULATING_ROWS):
        add(scheduler, str(index))
    assert any(chunk.num_proposed for _ in range(3) for chunk in step(scheduler).chunks)
    add(scheduler, "one more")
    step(scheduler)  # where it is a prompt
    batch = step(scheduler)
    assert len(batch.chunks) == MAX_SPECULATING_ROWS + 1
    assert {chunk.num_new_tokens for chunk in batch.chunks} == {1}


def test_whole_prompts_come_on_top_of_drafts_within_what_buffers_are_made_for() -> None:
    scheduler = make_scheduler(
        enable_chunked_prefill=False,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    for index in range(6):
        add(scheduler, str(index), max_tokens=60)
    for _ in range(3):
        step(scheduler)
    add(scheduler, "long", prompt=60, max_tokens=3)
    largest = max(step(scheduler).num_tokens for _ in range(3))
    assert 64 + 8 < largest <= scheduler.config.max_step_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_is_paid_for_once_however_often_it_is_asked_for(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while steps are in flight, whose drafts are not verified yet."""
    num_paid = 0

    def pass_step(controller: DraftController, num_rows: int) -> None:
        nonlocal num_paid
        num_paid += 1

    monkeypatch.setattr(DraftController, "pass_step", pass_step)
    monkeypatch.setattr(HostDrafts, "drafting", lambda self, num_rows: num_rows > 0)
    scheduler = make_scheduler(on_device=False, adaptive=True, depth=depth)
    add(scheduler, "a")
    step(scheduler)
    for _ in range(5):
        batches = [scheduler.schedule() for _ in range(depth)]
        for batch in batches:
            assert batch is not None
            scheduler.update(batch, result_of(batch))
    assert num_paid == 5 * depth


def test_a_hosts_drafts_go_on_over_tokens_in_flight_as_long_as_those_seem_right() -> None:
    scheduler = make_scheduler(on_device=False, depth=2)
    add(scheduler, "a")
    step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    [one], [behind] = first.chunks, second.chunks
    assert (one.num_drafts, one.start_known) == (MOST, True)
    assert (behind.num_drafts, behind.start_known) == (MOST, False)
    assert behind.num_computed_tokens == one.num_computed_tokens + 1 + MOST
    # All of the first are right, and then one: it is known now what the next step goes on from.
    scheduler.update(first, result_of(first))
    scheduler.update(second, StepOutput(((5, 6),)))
    third, fourth = scheduler.schedule(), scheduler.schedule()
    assert third is not None
    assert fourth is not None
    [chunk] = third.chunks
    assert chunk.num_computed_tokens == behind.num_computed_tokens + 2 - 1 + 1
    assert chunk.draft_token_ids == (6,) * MOST
    # None is, so the fourth stands nowhere that is known, and the fifth has no drafts.
    scheduler.update(third, StepOutput(((7,),)))
    fifth = scheduler.schedule()
    assert fifth is not None
    assert fifth.chunks[0].num_drafts == 0
    scheduler.update(fourth, StepOutput(((7,),)))
    sixth = scheduler.schedule()
    assert sixth is not None
    assert sixth.chunks[0].draft_token_ids == (7,) * MOST


def test_a_hosts_drafts_are_for_one_step_also_while_it_is_found_out_who_made_it_raise() -> None:
    scheduler = make_scheduler(on_device=False)
    request = add(scheduler, "a", max_tokens=4)
    step(scheduler)
    assert scheduler.schedule() is not None
    scheduler.retract()
    while not request.finished:
        batch = scheduler.schedule_only([request])
        assert batch is not None
        room = request.max_num_tokens - len(request.token_ids) - 1
        assert batch.chunks[0].num_drafts <= room
        scheduler.update(batch, result_of(batch, num_right=0))
    assert request.num_output_tokens == 4


def test_a_request_without_a_place_in_a_step_takes_its_drafts_into_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That may be full: it once had more tokens than buffers are made for."""
    scheduler = make_scheduler(on_device=False)
    request = add(scheduler, "a")
    step(scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(Places, "allocate_or_preempt", lambda *_: None)
        assert scheduler.schedule() is None
    batch = scheduler.schedule_only([request])
    assert batch is not None
    assert batch.num_tokens == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_right", [0, 1, MOST])
def test_no_draft_is_planned_beyond_the_last_token(depth: int, num_right: int) -> None:
    scheduler = make_scheduler(depth=depth, max_model_len=32, num_kv_blocks=8)
    request = add(scheduler, "a", prompt=3, max_tokens=29)
    in_flight: list[ScheduledBatch] = []
    while not request.finished:
        batch = scheduler.schedule() if len(in_flight) < depth else None
        if batch is None:
            oldest = in_flight.pop(0)
            scheduler.update(oldest, result_of(oldest, num_right))
            scheduler.cache.check_invariants()
            continue
        in_flight.append(batch)
        (chunk,) = batch.chunks
        end = chunk.num_computed_tokens + chunk.num_new_tokens
        assert end < request.max_num_tokens
        assert end + chunk.num_proposed < request.max_num_tokens
        assert end + chunk.num_proposed <= request.kv_capacity
    assert request.num_output_tokens == 29
    assert request.num_in_flight_drafts == 0 or in_flight
