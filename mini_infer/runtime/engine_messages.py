"""What crosses the border between a server's process and its engine's: msgspec over ZeroMQ.

::

    server                                     engine
      Add, Finish, Listen, Call, Stop ──►
          ◄── Located, Loaded, News (one a step), Answer, Failed

A message is a MessagePack array, its kind first. Both ends are of one version, since one starts the
other, so nothing is negotiated.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from mini_infer.core import errors
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.events import (
    Admitted,
    BlockEvicted,
    BlocksAllocated,
    BlocksCached,
    BlocksReleased,
    ChunkScheduled,
    DraftsVerified,
    Event,
    Finished,
    Preempted,
    PrefixCacheReset,
    Queued,
    Resumed,
    StepCompleted,
    TokensEmitted,
)
from mini_infer.core.outputs import FinishReason, RequestUpdate
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams

EVENT_KINDS: tuple[type[Event], ...] = (
    Queued,
    Admitted,
    ChunkScheduled,
    BlocksAllocated,
    BlocksReleased,
    BlocksCached,
    BlockEvicted,
    PrefixCacheReset,
    Preempted,
    Resumed,
    TokensEmitted,
    DraftsVerified,
    Finished,
    StepCompleted,
)
"""All that an engine's process emits; a kind's number is its place here."""

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Add(msgspec.Struct, tag=True, array_like=True):
    """The choices of one caller's request, each with its id and seed, and what they share."""

    request_id: str
    choices: list[tuple[str, int]]
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    priority: int
    cache_salt: str
    told_at_end: bool

    @classmethod
    def of(cls, request_id: str, requests: Sequence[Request]) -> "Add":
        first = requests[0]
        return cls(
            request_id,
            [(request.request_id, request.seed) for request in requests],
            first.prompt_token_ids,
            first.params,
            first.max_tokens,
            first.eos_token_ids,
            first.bad_words_token_ids,
            first.priority,
            first.cache_salt,
            first.told_at_end,
        )

    def requests(self) -> list[Request]:
        return [
            Request(
                request_id=request_id,
                prompt_token_ids=self.prompt_token_ids,
                params=self.params,
                seed=seed,
                max_tokens=self.max_tokens,
                eos_token_ids=self.eos_token_ids,
                bad_words_token_ids=self.bad_words_token_ids,
                priority=self.priority,
                cache_salt=self.cache_salt,
                told_at_end=self.told_at_end,
            )
            for request_id, seed in self.choices
        ]


class Finish(msgspec.Struct, tag=True, array_like=True):
    """Ends choices from outside: a stop string, or an abort."""

    request_ids: list[str]
    reason: FinishReason
    stop_reason: int | str | None = None


class Listen(msgspec.Struct, tag=True, array_like=True):
    """The kinds of events that the server hears from now on, as numbers of ``EVENT_KINDS``."""

    kinds: list[int]


class Call(msgspec.Struct, tag=True, array_like=True):
    """A call between two steps, answered by an ``Answer`` of the same number."""

    number: int
    function: str
    arguments: list[str]


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The last message: the engine is shut down."""


ToEngine = Add | Finish | Listen | Call | Stop


class Failure(msgspec.Struct, array_like=True):
    """An exception, as it can cross the border."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        param = getattr(error, "param", None)
        if isinstance(error, ModuleNotFoundError):
            param = error.name
        return cls(type(error).__name__, str(error), param)

    def to_exception(self) -> Exception:
        """The same typed error, a missing package, memory or file as such; else RuntimeError."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.InvalidRequestError):
            return kind(self.message, self.param)
        if isinstance(kind, type) and issubclass(kind, errors.MiniInferError):
            return kind(self.message)
        if self.kind == "ModuleNotFoundError":
            return ModuleNotFoundError(self.message, name=self.param)
        if self.kind == "MemoryError":
            return MemoryError()
        if self.kind in ("OSError", "PermissionError", "FileNotFoundError"):
            return OSError(self.message)
        return RuntimeError(f"{self.kind}: {self.message}")


class Located(msgspec.Struct, tag=True, array_like=True):
    """Where the tokenizer is, for the server to load while the engine loads the rest; None where
    bytes are tokens."""

    folder: str | None


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The model stands; every ``auto`` of its configuration is decided."""

    config: EngineConfig


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine can't start, or ends: its last message."""

    failure: Failure


class News(msgspec.Struct, tag=True, array_like=True):
    """All that one step brought, with what happened since the one before."""

    updates: list[RequestUpdate]
    events: list[list[Any]]
    refusals: list[tuple[str, Failure]]
    """Of ``Add``s since the last step, by the callers' request ids."""
    unqueued: list[str]
    """Choices that a ``Finish`` ended before they were queued: no event will tell."""

    def happened(self) -> list[Event]:
        """The events, in order."""
        return [unpack_event(packed) for packed in self.events]


class Answer(msgspec.Struct, tag=True, array_like=True):
    """What a ``Call`` returned or raised."""

    number: int
    result: str | None
    failure: Failure | None = None


ToServer = Located | Loaded | Failed | News | Answer


class Link(Generic[Sent, Received]):
    """One end: a ZeroMQ socket of type PAIR, and what it sends and receives. For one thread."""

    def __init__(self, socket: "zmq.Socket[bytes]", received: Any, flags: int = 0) -> None:
        """``flags`` are those of sending."""
        self.socket = socket
        self._flags = flags
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], Received] = msgspec.msgpack.Decoder(received).decode

    def pack(self, message: Sent) -> bytes:
        """What ``send`` sends: for a thread of one's own, or to see whether it can be sent.

        Raises:
            OverflowError, UnicodeEncodeError: an integer of more than 64 bits, half a surrogate.
        """
        return self._encode(message)

    def send(self, message: Sent | bytes) -> None:
        """An engine waits where its server is too far behind. A server never waits: what can't be
        sent to an engine that is gone is dropped, for of its end the server hears otherwise."""
        with contextlib.suppress(zmq.Again):
            data = message if isinstance(message, bytes) else self._encode(message)
            self.socket.send(data, self._flags)

    @property
    def readable(self) -> bool:
        return bool(int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> Received:
        """The next message; waits for it."""
        return self._decode(self.socket.recv())


def to_engine(socket: "zmq.Socket[bytes]") -> Link[ToEngine, ToServer]:
    """The server's end."""
    return Link(socket, ToServer, zmq.DONTWAIT)


def to_server(socket: "zmq.Socket[bytes]") -> Link[ToServer, ToEngine]:
    """The engine's end."""
    return Link(socket, ToEngine)


def _fields_of(kind: type[Event]) -> Callable[[Event], tuple[Any, ...]]:
    names = [item.name for item in fields(kind)]
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda event: (get(event),)


_PACKERS = {kind: (number, _fields_of(kind)) for number, kind in enumerate(EVENT_KINDS)}


def pack_event(event: Event) -> list[Any]:
    """An event as it crosses: the number of its kind, then its fields."""
    number, values = _PACKERS[type(event)]
    return [number, *values(event)]


def unpack_event(packed: Sequence[Any]) -> Event:
    """The event that ``pack_event`` packed."""
    kind: Callable[..., Event] = EVENT_KINDS[packed[0]]
    if kind is TokensEmitted:
        _, time, request_id, token_ids, num_output_tokens = packed
        return TokensEmitted(time, request_id, tuple(token_ids), num_output_tokens)
    if kind is BlocksAllocated:
        _, time, request_id, block_ids = packed
        return BlocksAllocated(time, request_id, tuple(block_ids))
    if kind is BlocksCached:
        _, time, request_id, block_hashes = packed
        return BlocksCached(time, request_id, tuple(block_hashes))
    return kind(*packed[1:])
