"""One after the other."""

from collections.abc import Sequence

from mini_infer.runtime.routing.router import Candidate, RoutedRequest


class RoundRobin:
    """Implements ``Router``: the next replica after the last one chosen, whatever its load."""

    asks_for_prefixes = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        later = [replica.index for replica in replicas if replica.index > self._last]
        self._last = min(later) if later else min(replica.index for replica in replicas)
        return self._last
