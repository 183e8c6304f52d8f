"""An engine in another process, from the side of the event loop that talks to it."""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable

import zmq

from mini_infer.core.errors import EngineDeadError
from mini_infer.core.events import Event, EventStream, Subscriber
from mini_infer.runtime.engine_messages import (
    EVENT_KINDS,
    Answer,
    Call,
    Failed,
    Listen,
    Loaded,
    Located,
    News,
    ToEngine,
    ToServer,
)
from mini_infer.runtime.engine_process import EngineHost

logger = logging.getLogger(__name__)


class ServerEvents(EventStream):
    """All engines' events as they arrive, and the server's own. An engine is told which kinds
    anybody listens to, so that it neither builds nor sends others."""

    def __init__(self, num_engines: int, on_change: Callable[[], None]) -> None:
        """``on_change`` is told when somebody begins or ceases to listen."""
        super().__init__()
        self._on_change = on_change
        self.engines = [EngineEvents(self) for _ in range(num_engines)]

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        super().subscribe(subscriber, *kinds)
        self.changed()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        super().unsubscribe(subscriber)
        self.changed()

    def emit(self, event: Event) -> None:
        """An event of the server's own, of which no engine knows: whoever listens to one engine
        hears it, too."""
        super().emit(event)
        for engine in self.engines:
            engine.hear(event)

    def changed(self) -> None:
        """Somebody began or ceased to listen, here or to an engine."""
        for engine in self.engines:
            engine.all_listeners = {}  # a new one: another thread may be filling the old one
        self._on_change()

    def listeners_of(self, kind: type[Event]) -> tuple[Subscriber, ...]:
        return self._listeners_of(kind)


class EngineEvents(EventStream):
    """One engine's events: who listens here hears of no other engine."""

    def __init__(self, server: ServerEvents) -> None:
        super().__init__()
        self._server = server
        self.all_listeners: dict[type[Event], tuple[Subscriber, ...]] = {}
        """Here and to the server, by type: one look-up an event, of which there is one a token."""

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        super().subscribe(subscriber, *kinds)
        self._server.changed()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        super().unsubscribe(subscriber)
        self._server.changed()

    def emit(self, event: Event) -> None:
        kind = type(event)
        listeners = self.all_listeners.get(kind)
        if listeners is None:
            listeners = self._listeners_of(kind) + self._server.listeners_of(kind)
            self.all_listeners[kind] = listeners
        for listener in listeners:
            listener(event)

    def hear(self, event: Event) -> None:
        """An event of the server's own."""
        super().emit(event)

    def wanted(self) -> Listen:
        """What the engine has to tell."""
        kinds = enumerate(EVENT_KINDS)
        return Listen([i for i, kind in kinds if self.wants(kind) or self._server.wants(kind)])


MESSAGES_A_TURN = 4
"""Of an engine that is ahead of its server: what they bring for one stream is sent at once then,
which lets the server catch up, and a turn is still short."""


class EngineClient:
    """One host's link in one event loop: sends, hands out what comes, notices the host's end."""

    def __init__(
        self,
        host: EngineHost,
        loop: asyncio.AbstractEventLoop,
        on_news: Callable[[News], None],
        on_end: Callable[[str], None],
    ) -> None:
        """``on_end`` is called once, with how the host ended, after the last news."""
        self.host = host
        self._loop = loop
        self._on_news = on_news
        self._on_end = on_end
        self._calls: dict[int, asyncio.Future[str | None]] = {}
        self._numbers = itertools.count()
        self._fd = int(host.link.socket.get(zmq.FD))
        self._reading = False
        self._ended = False
        loop.add_reader(self._fd, self._read_soon)
        threading.Thread(target=self._watch, name="mini-infer-watch", daemon=True).start()
        self._read_soon()

    def send(self, message: ToEngine | bytes) -> None:
        if not self._ended:
            self.host.link.send(message)
            self._read_soon()

    async def call(self, function: str, *arguments: str) -> str | None:
        """Calls a function of ``EngineLoop`` between two steps.

        Raises:
            EngineDeadError: the engine ended before it answered.
        """
        number = next(self._numbers)
        answer: asyncio.Future[str | None] = self._loop.create_future()
        self._calls[number] = answer
        self.send(Call(number, function, list(arguments)))
        try:
            return await answer
        finally:
            del self._calls[number]

    def detach(self) -> None:
        """Hears no more of the host."""
        if self._ended:
            return
        self._ended = True
        self._loop.remove_reader(self._fd)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine ended before it answered"))

    def _read_soon(self) -> None:
        """ZeroMQ's descriptor tells of changes only, and sending may swallow one: look each time.
        Few messages a turn, so that a quick engine leaves the loop to others."""
        if not (self._reading or self._ended):
            self._reading = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading = False
        for _ in range(MESSAGES_A_TURN):
            if self._ended or not self.host.link.readable:
                return
            self._take_in(self.host.link.receive())
        self._read_soon()

    def _take_in(self, message: ToServer) -> None:
        match message:
            case News():
                try:
                    self._on_news(message)
                except Exception:  # a subscriber's, or a fault of ours: what it held up is lost
                    logger.exception("the server failed on news of its engine")
                    self._end("sent what the server failed on")
            case Answer():
                answer = self._calls.get(message.number)
                if answer is None or answer.done():  # whoever asked is gone
                    return
                if message.failure:
                    answer.set_exception(message.failure.to_exception())
                else:
                    answer.set_result(message.result)
            case Failed():
                self._end(f"failed ({message.failure.kind})")
            case Located() | Loaded():
                raise AssertionError("a host is loaded already")

    def _watch(self) -> None:
        how = self.host.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._on_exit, how)

    def _on_exit(self, how: str) -> None:
        while not self._ended and self.host.link.readable:
            self._take_in(self.host.link.receive())
        self._end(how)

    def _end(self, how: str) -> None:
        if not self._ended:
            self.detach()
            self._on_end(how)
