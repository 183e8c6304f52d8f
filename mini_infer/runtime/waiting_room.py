"""How many choices wait for their first step, and how many may."""

from mini_infer.core.errors import UnavailableError
from mini_infer.core.events import Admitted, Event, EventStream, Finished, Queued, Rerouted

MAX_NUM_QUEUED = 1024
"""Choices that may wait unless told otherwise."""


class WaitingRoom:
    """Counts choices from the moment a caller comes until a step takes them up.

    ::

        enter ──► being tokenised, on the way to the engine ──► Queued ──► Admitted
    """

    def __init__(self, events: EventStream, limit: int) -> None:
        self._limit = limit
        self._num_entered = 0
        """Not yet queued."""
        self._queued: set[str] = set()
        events.subscribe(self._observe, Queued, Admitted, Finished, Rerouted)

    @property
    def num_waiting(self) -> int:
        return self._num_entered + len(self._queued)

    def check(self, num_choices: int = 1) -> None:
        """Raises UnavailableError if as many more would be too many. An empty room takes anything:
        what alone is too much would otherwise be told to try again for ever."""
        num_waiting = self.num_waiting
        if num_waiting and num_waiting + num_choices > self._limit:
            raise UnavailableError(
                f"the server is overloaded: {num_waiting} choices wait and at most {self._limit} "
                f"may; try again after a moment"
            )

    def enter(self, num_choices: int) -> None:
        """Raises UnavailableError as ``check`` does."""
        self.check(num_choices)
        self._num_entered += num_choices

    def leave(self, num_choices: int) -> None:
        """Undoes ``enter``, for choices that are never queued."""
        self._num_entered -= num_choices

    def _observe(self, event: Event) -> None:
        if isinstance(event, Queued):
            self._num_entered -= 1
            self._queued.add(event.request_id)
        elif isinstance(event, Rerouted):
            self._num_entered += 1
            self._queued.discard(event.request_id)
        elif isinstance(event, Admitted | Finished):
            self._queued.discard(event.request_id)
