"""Serves an ``EngineCore`` to the other end of a link: messages in, one message a step out."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mini_infer.core.errors import EngineDeadError, MiniInferError
from mini_infer.core.events import Event
from mini_infer.core.outputs import RequestUpdate
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.engine_messages import (
    EVENT_KINDS,
    Add,
    Answer,
    Call,
    Failed,
    Failure,
    Finish,
    Link,
    Listen,
    News,
    Stop,
    ToEngine,
    ToServer,
    pack_event,
)
from mini_infer.runtime.engine_profiler import EngineProfiler
from mini_infer.runtime.engine_pulse import Pulse
from mini_infer.runtime.executor import WatchedExecutor

logger = logging.getLogger(__name__)

SAVE_POLL_MS = 20
"""How often an idle engine looks whether a profile is written."""
LOOK_MS = 500
"""How often it looks whether others that run its steps are still there."""


class EngineLoop:
    """Obeys the link, steps, and tells the link, until ``Stop`` or the engine's death."""

    def __init__(
        self, core: EngineCore, link: Link[ToServer, ToEngine], pulse: Pulse | None = None
    ) -> None:
        """``pulse`` is told of each turn, where somebody looks whether there are any."""
        self._core = core
        self._link = link
        self._pulse = pulse or Pulse()
        self._profiler = EngineProfiler()
        self._events: list[Event] = []
        self._refusals: list[tuple[str, Failure]] = []
        self._unqueued: list[str] = []
        self._saves: list[tuple[int, Future[Path]]] = []
        """Profiles that are being written, in a thread, as it takes seconds."""
        self._writer = ThreadPoolExecutor(1, "mini-infer-profile")

    def run(self) -> None:
        """Returns after ``Stop``.

        Raises:
            Exception: whatever ended the engine; the other end has been told.
        """
        try:
            while self._obey():
                self._pulse.begin()
                updates = self._core.step()
                self._pulse.end()
                self._tell(updates)
        except Exception as error:
            # Where ranks have died, the error says it all; of any other, the place matters.
            told = isinstance(error, EngineDeadError)
            logger.error("the engine failed: %s", error, exc_info=not told)
            self._link.send(Failed(Failure.of(error)))
            raise
        finally:
            self._writer.shutdown()
            self._core.shutdown()

    def _obey(self) -> bool:
        """Takes in the messages that are there, waiting for one while the engine is idle.

        Returns False when the loop should end.
        """
        while True:
            self._answer_saves()
            if not self._link.readable:
                # What an abort freed is told without a step, as none may follow.
                if self._core.has_unfinished() or self._has_news:
                    return True
                if not self._link.socket.poll(self._patience):
                    self._look()
                continue
            message = self._link.receive()
            if isinstance(message, Stop):
                return False
            if isinstance(message, Call):
                with self._pulse.patience():
                    self._call(message)
            else:
                self._pulse.begin()
                self._take_in(message)
                self._pulse.end()

    @property
    def _patience(self) -> int | None:
        """Milliseconds that an idle engine waits for a message; None: as long as it takes."""
        if self._saves:
            return SAVE_POLL_MS
        return LOOK_MS if isinstance(self._core.executor, WatchedExecutor) else None

    def _look(self) -> None:
        if isinstance(self._core.executor, WatchedExecutor):
            self._core.executor.look()

    def _take_in(self, message: Add | Finish | Listen) -> None:
        match message:
            case Add():
                try:
                    self._core.add(message.requests())
                except MiniInferError as error:
                    self._refusals.append((message.request_id, Failure.of(error)))
            case Finish():
                for request_id in message.request_ids:
                    if request_id not in self._core.scheduler:
                        self._unqueued.append(request_id)
                    self._core.finish(request_id, message.reason, message.stop_reason)
            case Listen():
                self._core.events.unsubscribe(self._events.append)
                kinds = [EVENT_KINDS[number] for number in message.kinds]
                self._core.events.subscribe(self._events.append, *kinds)

    def _call(self, call: Call) -> None:
        try:
            match call.function, call.arguments:
                case "reset_prefix_cache", []:
                    self._core.reset_prefix_cache()
                case "start_profile", []:
                    self._profiler.start()
                case "stop_profile", [folder]:
                    saved = self._writer.submit(self._save, self._profiler.stop(), Path(folder))
                    self._saves.append((call.number, saved))
                    return
                case _:
                    raise AssertionError(f"no function {call.function!r}")
        except Exception as error:  # the caller's, not the engine's
            self._link.send(Answer(call.number, None, Failure.of(error)))
        else:
            self._tell([])  # first what it did: whoever gets the answer may rely on that
            self._link.send(Answer(call.number, None))

    def _save(self, write: Callable[[Path], Path], folder: Path) -> Path:
        with self._pulse.patience():
            return write(folder)

    def _answer_saves(self) -> None:
        for number, saved in [item for item in self._saves if item[1].done()]:
            self._saves.remove((number, saved))
            error = saved.exception()
            if error:
                self._link.send(Answer(number, None, Failure.of(error)))
            else:
                self._link.send(Answer(number, str(saved.result())))

    @property
    def _has_news(self) -> bool:
        return bool(self._events or self._refusals or self._unqueued)

    def _tell(self, updates: list[RequestUpdate]) -> None:
        if not (updates or self._has_news):
            return
        events = [pack_event(event) for event in self._events]
        self._events.clear()  # the list itself is subscribed
        self._link.send(News(updates, events, self._refusals, self._unqueued))
        self._refusals, self._unqueued = [], []
