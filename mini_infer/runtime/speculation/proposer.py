"""What a proposer on the host is."""

from collections.abc import Sequence
from typing import Protocol

from mini_infer.core.request import Request


class Proposer(Protocol):
    """Guesses what comes next. Select your own with ``{"method": "module:Class"}``.

    It is built with the engine's ``SpeculativeConfig`` as its only argument, and belongs to one
    engine and its thread. Whatever it proposes, the output stays the target model's own.
    """

    def propose(self, requests: Sequence[Request], num_drafts: int) -> Sequence[Sequence[int]]:
        """For each request up to ``num_drafts`` tokens, in order, that may follow its
        ``token_ids``; fewer, or none, where it has no idea. The first of them stand for what is in
        flight, so there may be more than ``num_speculative_tokens``.

        A request is to be read only. It is one object for its whole life, so what a proposer
        remembers of it may be kept in a ``weakref.WeakKeyDictionary``.
        """
        ...
