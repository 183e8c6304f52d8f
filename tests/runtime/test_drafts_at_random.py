"""The scheduler's promises beside drafts, whatever is accepted, aborted or taken back."""

import random
from collections.abc import Sequence

import pytest

from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.core.errors import PromptTooLongError
from mini_infer.core.events import EventStream
from mini_infer.core.outputs import StepOutput
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.runtime.scheduler import Scheduler
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.host_drafts import HostDrafts
from tests.runtime.fake_executor import make_config

MOST = 4
NUM_REQUESTS = 8


class SaysItAgain:
    def __init__(self, config: SpeculativeConfig) -> None:
        pass

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        return [[7] * (len(request.token_ids) % (num_drafts + 1)) for request in requests]


class RandomRun:
    """A scheduler in a small world, with steps whose results are drawn."""

    def __init__(self, die: random.Random, on_device: bool) -> None:
        chunked, block_size = die.random() < 0.7, die.choice([1, 4, 16])
        num_blocks = die.choice([64, 100, 400]) // block_size + 1
        budget = die.choice([3, 16, 64]) if chunked else 64
        config = make_config(
            speculative_config=SpeculativeConfig(
                method="early_exit" if on_device else f"{__name__}:SaysItAgain",
                num_speculative_tokens=MOST,
                on_device=on_device,
            ),
            depth=die.randint(1, 3),
            block_size=block_size,
            num_kv_blocks=num_blocks,
            enable_chunked_prefill=chunked,
            max_num_batched_tokens=budget,
            max_model_len=64,
            max_num_seqs=min(die.choice([1, 3, 8]), budget),
            scheduling_policy=die.choice(["fcfs", "priority"]),
        )
        self.die, self.config = die, config
        self.scheduler = Scheduler(config, num_blocks, EventStream())
        self.requests: list[Request] = []
        self.in_flight: list[ScheduledBatch] = []

    def to_the_end(self) -> None:
        scheduler, die = self.scheduler, self.die
        for _ in range(1000):
            if len(self.requests) < NUM_REQUESTS:
                self._add()
            elif not scheduler.has_unfinished() and not self.in_flight:
                assert scheduler.cache.num_used_blocks == 0
                return
            if die.random() < 0.03 and self.requests:
                scheduler.abort(die.choice(self.requests).request_id)
            if die.random() < 0.03 and self.in_flight:
                scheduler.retract()
                self.in_flight.clear()
            may_schedule = len(self.in_flight) < self.config.depth
            batch = scheduler.schedule() if may_schedule else None
            if batch is not None:
                self._check(batch)
                self.in_flight.append(batch)
            elif self.in_flight:
                self._take_in(self.in_flight.pop(0))
            else:
                assert not scheduler.has_unfinished(), "nothing runs, and nothing ever will"
        raise AssertionError("it takes too long")

    def _add(self) -> None:
        length = self.die.randint(1, 40)
        request = Request(
            str(len(self.requests)),
            [1] * length,
            SamplingParams(),
            seed=0,
            max_tokens=self.die.randint(1, min(24, 64 - length)),
            priority=self.die.randint(0, 2),
        )
        self.requests.append(request)
        try:
            self.scheduler.add(request)
        except PromptTooLongError:
            self.requests.pop()

    def _check(self, batch: ScheduledBatch) -> None:
        assert batch.num_tokens <= self.config.max_step_tokens
        for chunk in batch.chunks:
            request = self.requests[int(chunk.request_id)]
            end = chunk.num_computed_tokens + chunk.num_new_tokens + chunk.num_proposed
            assert end <= request.kv_capacity, "every draft has room for its keys"
            assert end < request.max_num_tokens, "the last token is no input, nor behind it one"
            assert chunk.samples or not (chunk.num_drafts or chunk.num_proposed)

    def _take_in(self, batch: ScheduledBatch) -> None:
        def sampled(chunk: Chunk) -> tuple[int, ...]:
            count = 1 + self.die.randint(0, chunk.num_drafts)
            return (7,) * count if chunk.samples else ()

        self.scheduler.update(batch, StepOutput(tuple(map(sampled, batch.chunks))))
        self.scheduler.cache.check_invariants()
        for request in self.requests:
            if not request.finished and request.num_in_flight_steps == 0:
                assert request.num_in_flight_tokens == request.num_in_flight_drafts == 0
                assert request.num_computed_tokens < len(request.token_ids)


@pytest.mark.parametrize("on_device", [False, True])
def test_steps_keep_within_their_limits_and_never_end_early(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = random.Random(on_device)
    monkeypatch.setattr(DraftController, "num_drafts", lambda *_: die.choice([0, 1, 3, MOST]))
    monkeypatch.setattr(HostDrafts, "drafting", lambda self, rows: rows > 0 and die.random() < 0.6)
    for _ in range(60):
        RandomRun(die, on_device).to_the_end()
