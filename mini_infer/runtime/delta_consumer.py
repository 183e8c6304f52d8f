"""Where the deltas of one stream wait for who reads them."""

import asyncio
from collections.abc import Sequence

from mini_infer.core.outputs import RequestDelta

MAX_BACKLOG = 2**14
"""Deltas, and log-probabilities within, that a stream's reader may be behind: 4 to 8 MB."""


class Consumer:
    """Where the deltas of one stream wait. Used by the event loop's thread only.

    The engine does not wait for who reads slowly, or everybody would. Instead such a reader has
    ``MAX_BACKLOG``, and whoever fills it must be given up.
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.unfinished = dict.fromkeys(request_ids)
        self.error: Exception | None = None
        self.backlog = 0
        """Tokens and log-probabilities that wait."""
        self._ready: list[RequestDelta] = []
        self._wakeup = asyncio.Event()

    def push(self, delta: RequestDelta) -> None:
        if delta.output is None:  # an answer's end adds nothing that would have to be bounded
            self.backlog += 1 + sum(map(len, delta.logprobs))
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
        ready, self._ready, self.backlog = self._ready, [], 0
        return ready
