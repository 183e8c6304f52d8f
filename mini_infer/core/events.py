"""The event stream: everything worth knowing, once, typed, on one monotonic clock.

``/metrics``, the log line, latency figures of a request, benchmarks and invariant tests all read
this stream; nothing else counts anything. An event to which nobody listens is not even built: a
step of hundreds of requests would spend more on its events than on its scheduling.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from mini_infer.core.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class Event:
    """``time`` is ``time.monotonic()`` when the event was emitted."""

    time: float


@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    request_id: str


@dataclass(frozen=True, slots=True)
class Queued(RequestEvent):
    """A choice waits; ``max_tokens`` is what its answer may have within the context.

    A caller's request of ``num_choices`` above one is as many of these, ``ID#0``, ``ID#1``, ...
    """

    num_prompt_tokens: int
    max_tokens: int = 0
    num_choices: int = 1

    @property
    def caller_id(self) -> str:
        """The caller's request, which this is a choice of."""
        if self.num_choices == 1:
            return self.request_id
        return self.request_id.rpartition("#")[0]


@dataclass(frozen=True, slots=True)
class Admitted(RequestEvent):
    """First admission; ``num_cached_tokens`` is the length of the prefix-cache hit.

    ``num_queried_tokens`` is how much of the prompt was looked up: all, or nothing where the cache
    is off or the request needs every position's logits.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_queried_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChunkScheduled(RequestEvent):
    step_id: int
    num_computed_tokens: int
    num_new_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksAllocated(RequestEvent):
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksReleased(RequestEvent):
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlocksCached(RequestEvent):
    """From now on others can find these prefixes: each hash names one, down to the end of a full
    block. What another block holds already is not among them."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlockEvicted(Event):
    """A cached block lost its content to make room: the prefix that ended with it is gone."""

    block_id: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class PrefixCacheReset(Event):
    """All prefixes are gone."""


@dataclass(frozen=True, slots=True)
class Preempted(RequestEvent):
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Rerouted(RequestEvent):
    """A queued choice whose engine died before it told a token: another engine queues it anew."""


@dataclass(frozen=True, slots=True)
class Resumed(RequestEvent):
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokensEmitted(RequestEvent):
    token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class DraftsVerified(RequestEvent):
    """A step compared ``num_drafts`` drafts with what the model itself samples; the first
    ``num_accepted`` were that. Its tokens are those and one more.

    ``seconds`` is what the whole step took, ``plain_seconds`` what plain decoding of this
    request's tokens would have, both by the cost model; 0 where there is none.
    """

    num_drafts: int
    num_accepted: int
    seconds: float = 0.0
    plain_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished(RequestEvent):
    """``first_token_time`` and ``last_token_time`` are those of its ``TokensEmitted``, for who
    does not listen to tokens; None where there was none."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(frozen=True, slots=True)
class Answered(RequestEvent):
    """A choice's answer is complete; ``reason`` is the one that its caller is told.

    It differs from that of ``Finished`` when the last token that was allowed completes a stop
    string, which only the text shows: "stop" here, "length" there.
    """

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class StepCompleted(Event):
    """State after a step: the gauges of ``/metrics`` and of the log line."""

    step_id: int
    num_tokens: int
    num_waiting: int
    num_running: int
    num_preempted: int
    num_used_blocks: int
    num_total_blocks: int


Subscriber = Callable[[Event], None]


class EventStream:
    """Hands each event to who listens to its type, in order, on the emitter's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._subscriptions: list[tuple[Subscriber, tuple[type[Event], ...]]] = []
        self._listeners: dict[type[Event], tuple[Subscriber, ...]] = {}
        """Of each type that was asked about since the last subscription."""

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        """Hears events of these types and of those derived from them, or without any, all."""
        self._subscriptions.append((subscriber, kinds or (Event,)))
        self._listeners = {}  # a new one: another thread may be filling the old one

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscriptions = [item for item in self._subscriptions if item[0] != subscriber]
        self._listeners = {}

    def wants(self, kind: type[Event]) -> bool:
        """Does anybody listen to ``kind``? Ask before building an event that comes every step."""
        return bool(self._listeners_of(kind))

    def emit(self, event: Event) -> None:
        for subscriber in self._listeners_of(type(event)):
            subscriber(event)

    def _listeners_of(self, kind: type[Event]) -> tuple[Subscriber, ...]:
        known = self._listeners
        found = known.get(kind)
        if found is None:
            found = known[kind] = tuple(
                subscriber for subscriber, kinds in self._subscriptions if issubclass(kind, kinds)
            )
        return found
