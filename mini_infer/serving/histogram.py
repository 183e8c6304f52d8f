"""Histograms as Prometheus knows them, and the bounds of vLLM's.

Where a dry run or a small model is faster than vLLM's first bound, ours has smaller bounds before
it: every query that names a bound of vLLM's finds it.
"""

from bisect import bisect_left
from collections.abc import Sequence

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKEN_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))
CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``largest``: vLLM's bounds of token counts."""
    bounds: list[float] = []
    power = 1
    while power <= largest:
        bounds += [float(step * power) for step in (1, 2, 5) if step * power <= largest]
        power *= 10
    return tuple(bounds)


class Histogram:
    """Counts per bucket (``le`` upper bounds) and their sum."""

    def __init__(self, help: str, bounds: Sequence[float]) -> None:
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, observations up to it), the last bound +Inf; and the sum."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._sum
