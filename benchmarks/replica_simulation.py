"""Replicas in simulated time: the real scheduler, KV cache and router, without model and HTTP.

A step takes as long as the cost model says, and an answer has as many tokens as the trace says. All
else is what a server runs: ``Scheduler`` and ``KVCacheManager`` of each replica, their events, and
the ``Dispatcher`` that reads them.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mini_infer.cli.load.trace import BLOCK_TOKENS, TracedRequest
from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.events import Admitted, Event, EventStream, Finished, TokensEmitted
from mini_infer.core.outputs import StepOutput
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.routing.dispatcher import Dispatcher
from mini_infer.runtime.routing.router import Router
from mini_infer.runtime.scheduler import Scheduler

IGNORES_EOS = SamplingParams(ignore_eos=True)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: what reading the weights takes, or its tokens, whichever is longer."""

    floor: float
    seconds_per_token: float

    def of(self, batch: ScheduledBatch) -> float:
        return max(self.floor, batch.num_tokens * self.seconds_per_token)


@dataclass
class ReplicaFigures:
    """What one replica did."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    busy_seconds: float = 0.0

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that the cache did not spare, and output tokens."""
        return self.num_prompt_tokens - self.num_cached_tokens + self.num_output_tokens


@dataclass
class Outcome:
    replicas: list[ReplicaFigures]
    seconds: float = 0.0
    """Of simulated time, from the first arrival to the last end."""
    times_to_first_token: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in a cache."""
        cached = sum(one.num_cached_tokens for one in self.replicas)
        return cached / sum(one.num_prompt_tokens for one in self.replicas)


class _Replica:
    def __init__(self, config: EngineConfig, num_blocks: int, clock: "Simulation") -> None:
        self.events = EventStream(lambda: clock.now)
        self.scheduler = Scheduler(config, num_blocks, self.events)
        self.batch: ScheduledBatch | None = None
        """The step that runs."""


class Simulation:
    """Replays a trace on replicas that share nothing but their router."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_replicas: int,
        router: Router,
        step_time: StepTime,
    ) -> None:
        self.now = 0.0
        self._step_time = step_time
        self._dispatcher = Dispatcher(router, num_replicas, config.block_size)
        self._replicas = [_Replica(config, num_blocks, self) for _ in range(num_replicas)]
        self.outcome = Outcome([ReplicaFigures() for _ in range(num_replicas)])
        self._arrivals: dict[str, float] = {}
        self._ends: list[tuple[float, int]] = []
        """When the step of which replica ends, the next one first."""
        for index, replica in enumerate(self._replicas):
            for kind in self._dispatcher.kinds:
                replica.events.subscribe(
                    lambda event, index=index: self._dispatcher.observe(index, event), kind
                )
            replica.events.subscribe(
                lambda event, index=index: self._count(index, event),
                Admitted,
                TokensEmitted,
                Finished,
            )

    def run(self, requests: Sequence[TracedRequest], speed: float) -> Outcome:
        """Replays the trace ``speed`` times as fast as it was recorded."""
        for number, traced in enumerate(requests):
            arrival = traced.arrival / speed
            self._run_until(arrival)
            self.now = arrival
            self._arrive(
                Request(
                    request_id=str(number),
                    prompt_token_ids=prompt_of(traced, number),
                    params=IGNORES_EOS,
                    seed=0,
                    max_tokens=max(1, traced.num_output_tokens),
                )
            )
        self._run_until(float("inf"))
        self.outcome.seconds = self.now
        return self.outcome

    def _arrive(self, request: Request) -> None:
        self._arrivals[request.request_id] = self.now
        hashes = self._dispatcher.block_hashes(request)
        index = self._dispatcher.send([request], hashes, range(len(self._replicas)))
        self._replicas[index].scheduler.add(request)
        if self._replicas[index].batch is None:
            self._begin_step(index)

    def _run_until(self, time: float) -> None:
        while self._ends and self._ends[0][0] <= time:
            self.now, index = heapq.heappop(self._ends)
            replica = self._replicas[index]
            assert replica.batch is not None
            tokens = tuple((0,) if chunk.samples else () for chunk in replica.batch.chunks)
            replica.scheduler.update(replica.batch, StepOutput(tokens))
            self._begin_step(index)

    def _begin_step(self, index: int) -> None:
        replica = self._replicas[index]
        replica.batch = replica.scheduler.schedule()
        if replica.batch is not None:
            seconds = self._step_time.of(replica.batch)
            self.outcome.replicas[index].busy_seconds += seconds
            heapq.heappush(self._ends, (self.now + seconds, index))

    def _count(self, index: int, event: Event) -> None:
        figures = self.outcome.replicas[index]
        match event:
            case Admitted():
                figures.num_requests += 1
                figures.num_prompt_tokens += event.num_prompt_tokens
                figures.num_cached_tokens += event.num_cached_tokens
            case TokensEmitted():
                arrival = self._arrivals.pop(event.request_id, None)
                if arrival is not None:
                    self.outcome.times_to_first_token.append(event.time - arrival)
            case Finished():
                figures.num_output_tokens += event.num_output_tokens


def prompt_of(traced: TracedRequest, number: int) -> list[int]:
    """A prompt of its length. Equal blocks of the trace are equal tokens, and others are not."""
    blocks: Iterator[int] = itertools.chain.from_iterable(
        itertools.repeat(block_id, BLOCK_TOKENS) for block_id in traced.block_ids
    )
    prompt = list(itertools.islice(blocks, traced.num_prompt_tokens))
    return prompt + [-1 - number] * (traced.num_prompt_tokens - len(prompt))
