"""Whose turn it is in a pipeline.

Each stage has a step of its own, and the token that a request gets in one is the input of its next:
so a request is in one step at a time, and steps alternate between groups of requests. A group is
whoever is there when a step is put together: nobody belongs to one, so none grows beyond its share
while others shrink as requests end.
"""

from collections.abc import Sequence
from itertools import islice

from mini_infer.core.request import Request


def whose_turn(decoding: Sequence[Request], num_steps: int) -> list[Request]:
    """Of the ``decoding`` requests, those whose last token is known, in their order: at most what
    each of ``num_steps`` steps in flight has if all have equally many.

    Of two steps, one may have gone without some who were too many for it: then the next one has
    them.
    """
    most = -(-len(decoding) // num_steps)
    known = (request for request in decoding if not request.num_in_flight_tokens)
    return list(islice(known, most))
