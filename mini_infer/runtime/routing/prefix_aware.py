"""Whoever has the prompt's beginning, unless it has too much else to do."""

from collections.abc import Sequence

from mini_infer.runtime.routing.router import Candidate, RoutedRequest

RECENT_WEIGHT = 1 / 8
"""What a token given of late weighs against one that is still to be computed."""


class PrefixAware:
    """Implements ``Router``: where the least has to be computed before this answer can begin.

    That is a replica's load and what it has not cached of the prompt, both in tokens. So the
    longest cached prefix wins, unless its replica is overloaded: its load exceeds another's by more
    tokens than its cache saves. Mooncake (arXiv 2407.00079) compares estimated times to the first
    token so, and Preble (arXiv 2407.00023) loads and prefixes.

    While all are idle, that alone would send whoever shares a system prompt to the first who had
    it, and leave the other caches empty. So what a replica was given of late counts too, by
    ``RECENT_WEIGHT``: a short prefix is soon not worth it, the prefix of a long talk is.
    """

    asks_for_prefixes = True

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        def cost(one: Candidate) -> tuple[float, int]:
            uncached = request.num_prompt_tokens - one.num_cached_tokens
            return one.load + uncached + RECENT_WEIGHT * one.num_recent_tokens, one.index

        return min(replicas, key=cost).index
