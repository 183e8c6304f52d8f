"""Whoever has the prompt's beginning, unless it has too much else to do."""

from collections.abc import Sequence

from mini_infer.runtime.routing.router import Candidate, RoutedRequest


class PrefixAware:
    """Implements ``Router``: where the least has to be computed before this answer can begin.

    That is a replica's load and what it has not cached of the prompt, both in tokens. So the
    longest cached prefix wins, unless its replica is overloaded: its load exceeds another's by more
    tokens than its cache saves. Who has no prefix goes to the least load; of equal ones, to who was
    given least so far. There is nothing to tune: a token that waits and a token that is missing
    take the same time to compute. Mooncake (arXiv 2407.00079) compares estimated times to the first
    token so, and Preble (arXiv 2407.00023) loads and prefixes.
    """

    asks_for_prefixes = True

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        def rank(one: Candidate) -> tuple[int, int, int]:
            return one.load - one.num_cached_tokens, one.num_given_tokens, one.index

        return min(replicas, key=rank).index
