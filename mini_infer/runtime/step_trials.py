"""Finds the request that makes the model raise, so that it alone fails and all others go on.

A step that raises is taken back: its requests lose their places, as in a preemption, and will be
computed anew (mostly from the prefix cache). They are then tried in halves, one half a step and
nobody beside them; a half that raises is halved again, and one request that raises alone is the
guilty one. Of n requests that is found in about 2 log2(n) steps. A half that has got past the place
where it failed is innocent.
"""

from collections.abc import Mapping, Sequence

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.request import Request


class StepTrials:
    """The requests that were in a step that raised, until each is found guilty or innocent."""

    def __init__(self) -> None:
        self._groups: list[list[Request]] = []
        """The last is tried next."""
        self._targets: dict[str, int] = {}
        """Tokens that an innocent request has computed, by its id."""
        self._num_failures = 0
        """Steps that failed since the last that did not."""

    @property
    def under_way(self) -> bool:
        """May there be suspects yet? While their step is in flight, ``next_group`` can't tell."""
        return bool(self._groups)

    def next_group(self) -> list[Request]:
        """Who may be in the next step, and nobody else; [] when there is no suspicion. With no step
        in flight: what one in flight computes would count as computed."""
        while self._groups:
            if group := self._suspects(self._groups[-1]):
                return group
            self._groups.pop()
        return []

    def fail(self, batch: ScheduledBatch, requests: Sequence[Request]) -> list[Request]:
        """``batch`` raised, and was taken back. ``requests`` are those of it that have not ended.

        Returns the guilty: a request that was alone, or all suspects where failure upon failure
        says that it is not a request that is at fault.
        """
        self._num_failures += 1
        if self._groups:
            self._groups.pop()
        else:
            self._targets.clear()
        if len(batch.chunks) == 1:
            return list(requests)
        self._targets |= _ends(batch)
        half = (len(requests) + 1) // 2
        self._groups += [group for group in (list(requests[half:]), list(requests[:half])) if group]
        # The guilty one of n is alone after log2(n) failures in a row; two may come together.
        if self._num_failures <= 2 * len(self._targets).bit_length() + 2:
            return []
        guilty = [request for group in self._groups for request in self._suspects(group)]
        self._groups.clear()
        return guilty

    def succeed(self) -> None:
        """A step was taken in."""
        self._num_failures = 0

    def give_up(self) -> None:
        """The suspects can't be tried, as blocks are lacking: they go on in company."""
        self._groups.clear()

    def _suspects(self, group: Sequence[Request]) -> list[Request]:
        return [
            request
            for request in group
            if not request.finished
            and request.num_computed_tokens < self._targets[request.request_id]
        ]


def _ends(batch: ScheduledBatch) -> Mapping[str, int]:
    """How far each request would have been, by its id."""
    return {
        chunk.request_id: chunk.num_computed_tokens + chunk.num_new_tokens for chunk in batch.chunks
    }
