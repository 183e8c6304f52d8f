"""One engine of a server's: its life, and the choices that it was given."""

import asyncio
from typing import TYPE_CHECKING, Protocol

from mini_infer.runtime.choices_in_flight import ChoicesInFlight
from mini_infer.runtime.engine_client import EngineClient, EngineEvents
from mini_infer.runtime.engine_messages import News, ToEngine
from mini_infer.runtime.engine_process import EngineHost
from mini_infer.runtime.engine_restarts import Restarts, Starter
from mini_infer.runtime.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from mini_infer.core.engine_config import EngineConfig


class ReplicaOwner(Protocol):
    """Who hears of a replica: ``AsyncEngine``. All in the event loop's thread."""

    def on_news(self, replica: "Replica", news: News) -> None:
        """What a step brought."""
        ...

    def on_death(self, replica: "Replica") -> None:
        """Its engine is gone, as its ``death`` says, and a restart has begun."""
        ...

    def on_given_up(self, replica: "Replica") -> None:
        """Its engine can't be started again, as its ``death`` says."""
        ...


class Replica:
    """An engine behind a link. One that dies is started again (``Restarts``), with an empty cache.

    It belongs to the event loop that it is started in.
    """

    def __init__(
        self,
        index: int,
        host: EngineHost,
        events: EngineEvents,
        room: WaitingRoom,
        starter: Starter | None,
        owner: ReplicaOwner,
        *,
        alone: bool,
    ) -> None:
        """``starter`` loads another host where the last one died. ``alone``, it is just the
        engine to whoever reads of it."""
        self.index = index
        self.events = events
        self.choices = ChoicesInFlight(events, room)
        self.death: str | None = None
        """Why it can't serve, perhaps for a while; None while it does."""
        self.given_up = False
        self._host = host
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: EngineClient | None = None
        told = () if alone else (f"replica {index}", "what it had begun ended with an error")
        self._restarts = Restarts(starter, self._on_restarted, self._on_given_up, *told)

    @property
    def running(self) -> bool:
        return self.death is None

    @property
    def config(self) -> "EngineConfig":
        return self._host.config

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listens to the engine."""
        self._loop = loop
        if self.running:
            self._connect(self._host)

    def pack(self, message: ToEngine) -> bytes:
        """What ``send`` sends; on whatever thread. Raises what ``Link.pack`` does."""
        return self._host.link.pack(message)

    def send(self, message: ToEngine | bytes) -> None:
        if self._client:
            self._client.send(message)

    async def call(self, function: str, *arguments: str) -> str | None:
        """Calls a function of ``EngineLoop`` between two steps.

        Raises:
            EngineDeadError: the engine ended before it answered.
        """
        assert self._client is not None
        return await self._client.call(function, *arguments)

    def listen(self) -> None:
        """Tells the engine which events anybody wants."""
        self.send(self.events.wanted())

    def detach(self, death: str) -> None:
        """Hears no more of the engine, and starts no other."""
        self._restarts.cancel()
        if self._client:
            self._client.detach()
        self.death = death

    def close(self) -> None:
        """Ends the engine, and waits for its end. Idempotent; on whatever thread."""
        self._host.close()

    def _connect(self, host: EngineHost) -> None:
        assert self._loop is not None
        self._host = host
        self._client = EngineClient(host, self._loop, self._on_news, self._on_end)
        self.listen()

    def _on_news(self, news: News) -> None:
        self._owner.on_news(self, news)

    def _on_end(self, how: str) -> None:
        self.death = self._restarts.begin(how, self._host)
        self._owner.on_death(self)

    def _on_restarted(self, host: EngineHost) -> None:
        self._connect(host)
        self.death = None

    def _on_given_up(self, why: str) -> None:
        self.death = why
        self.given_up = True
        self._owner.on_given_up(self)
