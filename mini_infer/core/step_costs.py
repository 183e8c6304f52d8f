"""What steps take on this device, measured at start-up: the cost model of speculation."""

from bisect import bisect_left
from dataclasses import dataclass

Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of steps with a few numbers of requests and drafts; others are interpolated.

    ``verify[i][j]`` is a step of ``rows[i]`` requests that verifies ``drafts[j]`` drafts of each;
    ``drafts[0]`` is 0, a plain decode. ``propose[i][j]`` is what proposing so many takes, on the
    device, in addition.
    """

    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    verify: Grid
    propose: Grid

    def verify_seconds(self, num_rows: int, num_drafts: int) -> float:
        """A step of ``num_rows`` requests with ``num_drafts`` drafts each."""
        return self._at(self.verify, num_rows, num_drafts)

    def propose_seconds(self, num_rows: int, num_drafts: int) -> float:
        """Proposing ``num_drafts`` for each of ``num_rows`` requests."""
        return self._at(self.propose, num_rows, num_drafts)

    def _at(self, grid: Grid, num_rows: int, num_drafts: int) -> float:
        by_rows = [_interpolated(self.drafts, row, num_drafts) for row in grid]
        return _interpolated(self.rows, by_rows, num_rows)


def _interpolated(
    places: tuple[int, ...], values: tuple[float, ...] | list[float], at: int
) -> float:
    """The value at ``at``, linear between the places; beyond the last as between the last two."""
    if len(places) == 1 or at <= places[0]:
        return values[0]
    right = min(bisect_left(places, at), len(places) - 1)
    left = right - 1
    share = (at - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])
