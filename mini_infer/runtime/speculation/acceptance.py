"""How likely drafts are right, measured as they are verified, with a memory that fades."""

from collections.abc import Sequence
from math import exp


class Acceptance:
    """For each position of a step's drafts: the share that is right, of those whose predecessors
    were.

    Only these are a sample: what stands behind a wrong draft is never judged. Where there are few
    samples, a prior counts as some.
    """

    def __init__(self, num_positions: int, prior_weight: float) -> None:
        """``prior_weight`` is the number of samples as which the prior counts."""
        self._prior_weight = prior_weight
        self._judged = [0.0] * num_positions
        self._right = [0.0] * num_positions

    def record(
        self, num_drafts: int, num_accepted: int, memory: float, weight: float = 1.0
    ) -> None:
        """Takes in one verification, or one that stands for ``weight`` of them; what is ``memory``
        of them ago still counts by a share of 1/e.

        Positions that were not judged fade too, towards the prior: so they will be tried again.
        """
        kept = exp(-weight / memory)
        for position in range(len(self._judged)):
            self._judged[position] *= kept
            self._right[position] *= kept
        for position in range(min(num_accepted + 1, num_drafts)):
            self._judged[position] += weight
        for position in range(num_accepted):
            self._right[position] += weight

    def limit(self, num_samples: float) -> None:
        """Forgets until no more than so many samples are left, so that few new ones count much."""
        if self._judged[0] > num_samples:
            share = num_samples / self._judged[0]
            self._judged = [share * judged for judged in self._judged]
            self._right = [share * right for right in self._right]

    def rates(self, prior: float | Sequence[float]) -> list[float]:
        """Of each position, the share that is right.

        Args:
            prior: that of each position, or that of the first: each further one then has its
                predecessor's rate as prior.
        """
        weight = self._prior_weight
        rates: list[float] = []
        rate = prior if isinstance(prior, int | float) else 0.0
        for position, (judged, right) in enumerate(zip(self._judged, self._right, strict=True)):
            expected = rate if isinstance(prior, int | float) else prior[position]
            rate = (right + weight * expected) / (judged + weight)
            rates.append(rate)
        return rates

    def survival(self, prior: float | Sequence[float]) -> list[float]:
        """Of each position, how likely a draft there is accepted: all before it must be, too."""
        survival: list[float] = []
        product = 1.0
        for rate in self.rates(prior):
            product *= rate
            survival.append(product)
        return survival
