"""Starts an engine again that died: a bounded number of times, at growing intervals."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from mini_infer.core.errors import ClusterResourcesError
from mini_infer.runtime.engine_process import EngineHost

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""In a row: one that has served for ``STABLE_SECONDS`` begins anew. A cluster without room for it
is asked again until it has some."""
STABLE_SECONDS = 60.0
FIRST_DELAY = 0.5
"""Seconds before a restart, twice as many before each further one: time for a device's memory to
come back."""


class Starter(Protocol):
    """What makes new engines: an ``EngineStarter``."""

    def start(self) -> EngineHost:
        """Loads one, on whatever thread."""
        ...

    def cancel(self) -> None:
        """Ends a ``start`` that is under way."""
        ...


class Restarts:
    """The supervisor of one engine. Its methods belong to the event loop's thread."""

    def __init__(
        self,
        starter: Starter | None,
        on_restarted: Callable[[EngineHost], None],
        on_given_up: Callable[[str], None],
        name: str = "the engine",
        loss: str = "its requests ended with an error",
    ) -> None:
        """Without a ``starter`` the first death is the last. ``name`` and ``loss`` are for the log:
        who died, and what that means."""
        self._name = name
        self._loss = loss
        self._starter = starter
        self._on_restarted = on_restarted
        self._on_given_up = on_given_up
        self._num_restarts = 0
        self._serving_since = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def begin(self, how: str, dead: EngineHost) -> str:
        """The engine has ended, and ``how`` says how: starts another one in the background.
        Returns what to tell its callers."""
        if time.monotonic() - self._serving_since > STABLE_SECONDS:
            self._num_restarts = 0
        self._task = asyncio.get_running_loop().create_task(self._restart(how, dead))
        if self._starter is None:
            return f"{self._name} {how}: restart the server, whose log may say more"
        logger.error("%s %s; %s", self._name, how, self._loss)
        return f"{self._name} {how} and is being restarted: send the request again after a moment"

    def cancel(self) -> None:
        """Starts nothing any more."""
        if self._task:
            self._task.cancel()
            if self._starter:
                self._starter.cancel()

    async def _restart(self, how: str, dead: EngineHost) -> None:
        try:
            await asyncio.to_thread(dead.close)
        except Exception:  # the next one may start all the same
            logger.exception("what the engine left could not be cleared away")
        while self._starter is not None and self._num_restarts < MAX_RESTARTS:
            await asyncio.sleep(FIRST_DELAY * 2**self._num_restarts)
            self._num_restarts += 1
            try:
                host = await asyncio.to_thread(self._starter.start)
            except ClusterResourcesError as error:  # it is not the engine's fault, and may pass
                self._num_restarts -= 1
                if how != (how := f"waits for a place: {error}"):
                    logger.error("%s %s", self._name, how)
                continue
            except Exception as error:  # whatever it is, its callers must not wait for ever
                how = f"could not be restarted: {str(error) or type(error).__name__}"
                logger.error("%s %s", self._name, how)
                continue
            logger.warning("%s runs again, with an empty cache", self._name)
            self._serving_since = time.monotonic()
            self._on_restarted(host)
            return
        tried = f"; {self._num_restarts} restarts did not help" if self._starter else ""
        self._on_given_up(f"{self._name} {how}{tried}")
