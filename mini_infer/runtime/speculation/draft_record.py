"""How a host's proposer fares with a request."""

from math import exp

from mini_infer.runtime.speculation.acceptance import Acceptance

PRIOR_RATE = 0.6
PRIOR_WEIGHT = 4.0
"""What is believed of drafts before any was judged, and as how many of them."""
ACCEPTANCE_MEMORY = 16.0
YIELD_MEMORY = 24.0
"""In proposals, and in steps: how long it is remembered what came of them."""


class DraftRecord:
    """Two things are measured. *Acceptance* is how often a draft is right: it tells how much of a
    proposal to verify. *Yield* is how often a step gains a token by a draft, also where there is
    no proposal: it tells whether steps should have drafts at all.
    """

    def __init__(self, num_positions: int, prior: "DraftRecord | None" = None) -> None:
        """Begins with what ``prior`` knows."""
        acceptance, yields, offered = [PRIOR_RATE], [0.0], 0.0
        if prior is not None:
            acceptance, yields = prior._acceptance.rates(), prior._yield.rates()
            offered = prior.offered
        self._num_positions = num_positions
        self._acceptance: Acceptance = Acceptance(num_positions, acceptance, PRIOR_WEIGHT)
        self._yield: Acceptance = Acceptance(num_positions, yields, PRIOR_WEIGHT)
        self.offered: float = offered
        """The share of steps for which there is a draft."""

    def add(self, num_drafts: int, num_judged: int, num_right: int, weight: float) -> None:
        """Takes in a proposal, possibly of no drafts.

        Args:
            num_drafts: of the proposal.
            num_judged: of these, as many as were compared with what came.
            num_right: of those, as many as were right before the first wrong one.
            weight: the number of proposals for which it stands.
        """
        if num_drafts:
            self._acceptance.record(num_judged, num_right, ACCEPTANCE_MEMORY)
        if num_judged == num_drafts:
            num_judged = min(num_drafts + 1, self._num_positions)  # behind them there was none
        self._yield.record(num_judged, num_right, YIELD_MEMORY, weight)
        share = exp(-weight / YIELD_MEMORY)
        self.offered = share * self.offered + (1.0 - share) * (num_drafts > 0)

    def survival(self) -> list[float]:
        """Of each position, how likely a draft there is accepted, if there is one."""
        return self._acceptance.survival()

    def expected(self) -> list[float]:
        """Of each position, how likely a step has a draft there that is accepted."""
        return self._yield.survival()
