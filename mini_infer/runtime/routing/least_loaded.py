"""Whoever has the least to do."""

from collections.abc import Sequence

from mini_infer.runtime.routing.router import Candidate, RoutedRequest


class LeastLoaded:
    """Implements ``Router``: the least load; of equal ones who was given least of late."""

    asks_for_prefixes = False

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        return min(replicas, key=lambda one: (one.load, one.num_recent_tokens, one.index)).index
