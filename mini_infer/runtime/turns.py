"""Whose turn it is in a pipeline.

Each stage has a step of its own, and the token that a request gets in one is the input of its next:
so a request is in one stage at a time, and steps alternate between groups of requests. A group is
whoever is ready when a step is put together: nobody belongs to one, so none grows beyond its share
while others shrink as requests end.

::

    stage 0   A1  B1  A2  B2  A3          A2 starts with the tokens that A1 brings, and is
    stage 1       A1  B1  A2  B2          planned before the host knows these
"""

import itertools
from collections.abc import Collection, Sequence

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.request import Request


class Turns:
    """Belongs to a scheduler."""

    def __init__(self, config: EngineConfig) -> None:
        self._is_fed = config.feeds_tokens_back
        self._num_stages = config.pipeline_parallel_size
        self._num_groups = min(self._num_stages, config.depth) if self._is_fed else config.depth
        """Where tokens are not fed back, all steps in flight have to be of different requests."""

    def next(
        self,
        decoding: Sequence[Request],
        in_flight: Sequence[tuple[int, list[Request]]],
        with_gap: bool = False,
    ) -> list[Request]:
        """Of the ``decoding`` requests those that are ready, in their order: at most the share of a
        group. Whoever is too many for a step is in the next one.

        Ready are those whose last token is known. Where the last stage feeds it back, others are
        as well, once their step is in that stage; before that ``with_gap`` only, as the first stage
        would wait. But a grammar has to know it.
        """
        most = -(-len(decoding) // self._num_groups)
        if not self._is_fed:
            return [r for r in decoding if not r.num_in_flight_tokens][:most]
        furthest = self._num_stages - 1  # whoever is there has the first stage wait for the longest
        for num_steps in range(furthest - 1, -1, -1) if with_gap else (furthest,):
            last = itertools.islice(reversed(in_flight), num_steps)
            busy = {request for _, requests in last for request in requests}
            if ready := [request for request in decoding if _is_ready(request, busy)]:
                return ready[:most]
        return []


def _is_ready(request: Request, busy: Collection[Request]) -> bool:
    if not request.num_in_flight_tokens:
        return True
    return request.grammar is None and request not in busy


def turns_of(config: EngineConfig) -> Turns | None:
    """None without a pipeline: then a request may be in all steps in flight."""
    return Turns(config) if config.is_pipelined else None
