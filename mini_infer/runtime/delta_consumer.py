"""Where the deltas of one stream wait for who reads them."""

import asyncio
from collections.abc import Sequence

from mini_infer.core.outputs import RequestDelta


class Consumer:
    """Where the deltas of one stream wait. Used by the event loop's thread only.

    Unbounded, because the engine must not wait; but a request makes at most its ``max_tokens``
    deltas per choice, so a consumer that stalls holds no more than its own answer.
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.unfinished = dict.fromkeys(request_ids)
        self.error: Exception | None = None
        self._ready: list[RequestDelta] = []
        self._wakeup = asyncio.Event()

    def push(self, delta: RequestDelta) -> None:
        self._ready.append(delta)
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._wakeup.set()

    async def take(self) -> list[RequestDelta]:
        """All deltas that are there; waits for the first one. [] when all requests finished.

        Raises:
            Exception: what ``fail`` was given, after the deltas that came before it.
        """
        while not self._ready:
            if self.error:
                raise self.error
            if not self.unfinished:
                return []
            self._wakeup.clear()
            await self._wakeup.wait()
        ready, self._ready = self._ready, []
        return ready
