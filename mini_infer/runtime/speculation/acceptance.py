"""How likely drafts are right, measured as they are verified, with a memory that fades."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import exp
from operator import mul

PREDECESSOR_WEIGHT = 1.0
"""In samples: how much a position's rate follows that of the one before."""


class Acceptance:
    """For each position of a step's drafts: the share that is right, of those whose predecessors
    were.

    Only these are a sample: what stands behind a wrong draft is never judged.
    """

    def __init__(self, num_positions: int, prior: Sequence[float], weight: float) -> None:
        """``prior`` has the rates that are believed of the first position, or of more, as if so
        many (``weight``) samples had shown them."""
        self._judged = [0.0] * num_positions
        self._right = [0.0] * num_positions
        for position, rate in enumerate(prior):
            self._judged[position] = weight
            self._right[position] = weight * rate

    def record(
        self, num_drafts: int, num_accepted: int, memory: float, weight: float = 1.0
    ) -> None:
        """Takes in one verification, or one that stands for ``weight`` of them; what is ``memory``
        of them ago still counts by a share of 1/e.

        Positions that were not judged fade too, until only their predecessors tell what is to be
        expected of them: so those that failed are tried again.
        """
        self.record_all({(num_drafts, num_accepted): weight}, memory)

    def record_all(self, verified: Mapping[tuple[int, int], float], memory: float) -> None:
        """Takes in many verifications, of one time: pairs as ``record``'s, with their weights."""
        kept = exp(-sum(verified.values()) / memory)
        self._judged = [kept * judged for judged in self._judged]
        self._right = [kept * right for right in self._right]
        for (num_drafts, num_accepted), weight in verified.items():
            for position in range(min(num_accepted + 1, num_drafts)):
                self._judged[position] += weight
            for position in range(num_accepted):
                self._right[position] += weight

    def limit(self, num_samples: float) -> None:
        """Keeps the rates, but as if few samples had shown them: a few new ones count much."""
        if self._judged[0] > num_samples:
            share = num_samples / self._judged[0]
            self._judged = [share * judged for judged in self._judged]
            self._right = [share * right for right in self._right]

    def rates(self) -> list[float]:
        """Of each position, the share that is right, given that all before it are."""
        before, weight = self._right[0] / self._judged[0], PREDECESSOR_WEIGHT
        rates = []
        for judged, right in zip(self._judged, self._right, strict=True):
            before = (right + weight * before) / (judged + weight)
            rates.append(before)
        return rates

    def survival(self) -> list[float]:
        """Of each position, how likely a draft there is accepted: all before it must be, too."""
        return list(accumulate(self.rates(), mul))
