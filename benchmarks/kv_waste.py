"""How much of the allocated KV blocks holds nothing, read from the event stream."""

from mini_infer.core.events import ChunkScheduled, Event, Finished, Preempted, StepCompleted


class KVWaste:
    """Adds up, after each step, the tokens that the used blocks have room for and those in them.

    Subscribe ``observe`` to ``HEARS``. A prefix that requests share would count for each of them,
    so measure without.
    """

    HEARS = (ChunkScheduled, StepCompleted, Finished, Preempted)

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[str, int] = {}
        self._num_held = 0
        self._sum_held = 0
        self._sum_allocated = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, ChunkScheduled):
            end = event.num_computed_tokens + event.num_new_tokens
            self._num_held += end - self._held.get(event.request_id, 0)
            self._held[event.request_id] = end
        elif isinstance(event, StepCompleted):
            self._sum_held += self._num_held
            self._sum_allocated += event.num_used_blocks * self._block_size
        elif isinstance(event, Finished | Preempted):
            self._num_held -= self._held.pop(event.request_id, 0)

    @property
    def percent(self) -> float:
        """Of the allocated tokens, over all steps."""
        return 100 * (1 - self._sum_held / self._sum_allocated) if self._sum_allocated else 0.0
