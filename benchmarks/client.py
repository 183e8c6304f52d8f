"""Sends requests to an engine and times them by its event stream."""

import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar

from mini_infer import LLM, SamplingParams
from mini_infer.core.events import Admitted, Event, Finished, Queued, TokensEmitted
from mini_infer.core.outputs import RequestOutput


@dataclass(frozen=True)
class Job:
    """A prompt and the exact number of tokens to generate from it."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def random_prompt(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    """Token ids without meaning: speed does not depend on them, and no two share a prefix."""
    return [rng.randrange(vocab_size) for _ in range(length)]


@dataclass
class Trace:
    """What the event stream said, by request id. Times are seconds of its monotonic clock."""

    HEARS: ClassVar = (TokensEmitted, Queued, Admitted, Finished)

    queued: dict[str, float] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that the prefix cache held at admission."""
    token_times: dict[str, list[float]] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    num_output_tokens: int = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, TokensEmitted):
            self.token_times[event.request_id].append(event.time)
            self.num_output_tokens += len(event.token_ids)
        elif isinstance(event, Queued):
            self.queued[event.request_id] = event.time
            self.token_times[event.request_id] = []
        elif isinstance(event, Admitted):
            self.cached[event.request_id] = event.num_cached_tokens
        elif isinstance(event, Finished):
            self.finished[event.request_id] = event.time

    @property
    def seconds(self) -> float:
        """From the first request queued to the last one finished."""
        return max(self.finished.values()) - min(self.queued.values())

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    def time_to_first_token(self, request_id: str) -> float:
        return self.token_times[request_id][0] - self.queued[request_id]

    def inter_token_latencies(
        self, request_ids: Iterable[str], since: float, until: float
    ) -> list[float]:
        """Gaps between a request's successive tokens, of all that overlap ``[since, until]``."""
        return [
            later - earlier
            for request_id in request_ids
            for earlier, later in itertools.pairwise(self.token_times[request_id])
            if later > since and earlier < until
        ]


class Client:
    """Drives one engine. A context: it listens to the engine's events while it is open."""

    def __init__(self, llm: LLM, temperature: float = 0.0) -> None:
        self._engine = llm.engine
        self._temperature = temperature
        self._ids = itertools.count()
        self.trace = Trace()
        self.outputs: dict[str, RequestOutput] = {}

    def __enter__(self) -> "Client":
        self._engine.events.subscribe(self.trace.observe, *Trace.HEARS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.events.unsubscribe(self.trace.observe)

    def send(self, job: Job) -> str:
        """Queues a request that runs to its full length; returns its id."""
        request_id = f"bench-{next(self._ids)}"
        params = SamplingParams(
            temperature=self._temperature, max_tokens=job.num_output_tokens, ignore_eos=True
        )
        self._engine.add_request(request_id, job.prompt_token_ids, params)
        return request_id

    def step(self) -> int:
        """Runs one step; returns how many requests it finished."""
        num_finished = 0
        for delta in self._engine.step():
            if delta.finish_reason == "error":
                raise SystemExit(f"the engine failed: {delta.stop_reason}")
            if delta.output is not None:
                self.outputs[delta.request_id] = delta.output
                num_finished += 1
        return num_finished

    def drain(self) -> None:
        """Steps until nothing runs."""
        while self._engine.has_unfinished():
            self.step()


def serve(llm: LLM, jobs: Sequence[Job], concurrency: int | None = None) -> Client:
    """Serves all jobs, at most ``concurrency`` at a time: one leaves, the next one comes.

    Starts with an empty prefix cache.
    """
    llm.engine.reset_prefix_cache()
    waiting = deque(jobs)
    with Client(llm) as client:
        for _ in range(min(concurrency or len(jobs), len(jobs))):
            client.send(waiting.popleft())
        while len(client.outputs) < len(jobs):
            for _ in range(client.step()):
                if waiting:
                    client.send(waiting.popleft())
    return client


def serve_in_groups(llm: LLM, jobs: Sequence[Job], size: int) -> Client:
    """Static batching: a group starts together, and the next waits until its last one ends."""
    llm.engine.reset_prefix_cache()
    with Client(llm) as client:
        for start in range(0, len(jobs), size):
            for job in jobs[start : start + size]:
                client.send(job)
            client.drain()
    return client


def warm_up(llm: LLM, jobs: Sequence[Job]) -> None:
    """First calls allocate and tune what later ones reuse; they are no part of a figure."""
    serve(llm, [Job(job.prompt_token_ids, min(job.num_output_tokens, 4)) for job in jobs])
