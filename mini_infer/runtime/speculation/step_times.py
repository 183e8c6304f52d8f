"""What steps take: as measured at start-up, and corrected by those that are seen."""

from dataclasses import dataclass

from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts

PRIOR_PLAIN = 1
PRIOR_DRAFTED = 3
PLAIN_MEMORY = 64
DRAFT_MEMORY = 16
"""In steps: what those that were measured at start-up count for, beside those that are timed; and
how many of the latter are remembered."""
EXCESS_KEPT = 0.998
"""By each plain step, of what drafts took longer: nobody knows whether they still would."""
REST = 5
UNSEEN_A_REST = 24
MOST_UNSEEN = 256
"""So many steps have no drafts (twice as many before the first of a number of requests), and again
behind so many with drafts for each plain one that was timed, up to ``MOST_UNSEEN``: those behind
the last drafts in flight tell what drafts are to be compared with."""


@dataclass(slots=True)
class _Seen:
    """Of steps with about as many requests."""

    factor: float = 1.0
    """What plain steps take, by what they should by the costs."""
    excess: float = 0.0
    """Seconds that steps with drafts take beyond what they should by costs and factor; below 0
    where they take less."""
    num_plain: int = PRIOR_PLAIN
    num_drafted: int = PRIOR_DRAFTED
    """Steps that the two are the mean of."""
    num_unseen: int = MOST_UNSEEN
    """Steps with drafts since a plain one was timed, or since a rest."""
    rest: int = 0
    """Steps of a rest that are left."""


class StepTimes:
    """Numbers of requests that share a bit length share what was seen: a host that has more to do
    for each request than the device holds up large batches, and no small ones."""

    def __init__(self, config: SpeculativeConfig, costs: StepCosts) -> None:
        self._config = config
        self._costs = costs
        self._verify: dict[int, tuple[float, ...]] = {}
        self._propose: dict[int, tuple[float, ...]] = {}
        """Of each number of requests, by the costs: of each of ``draft_counts``."""
        self._seen: dict[int, _Seen] = {}
        self._latest = _Seen()
        self._timed = False
        """Was any step? Else there is no use in rests."""

    def plain(self, num_rows: int) -> float:
        """A step without drafts."""
        verify = self._verify.get(num_rows) or self._verify_seconds(num_rows)
        return self._at(num_rows).factor * verify[0]

    def drafted(self, num_rows: int) -> list[float]:
        """Steps that verify and propose each of ``draft_counts``, the first of which is 0."""
        seen = self._at(num_rows)
        pairs = zip(self._verify_seconds(num_rows), self._propose[num_rows], strict=True)
        plain, *others = [seen.factor * (verify + propose) for verify, propose in pairs]
        return [plain, *(_corrected(plain, seconds, seen.excess) for seconds in others)]

    def step(self, num_rows: int, num_drafts: int, num_proposed: int) -> float:
        """One that verifies up to so many drafts of each request, and proposes so many."""
        seen = self._at(num_rows)
        verify = self._verify_seconds(num_rows)[self._place(num_drafts)]
        seconds = seen.factor * (verify + self._propose[num_rows][self._place(num_proposed)])
        if num_drafts:
            return _corrected(self.plain(num_rows), seconds, seen.excess)
        return seconds

    def draft_cost(self, num_rows: int) -> float:
        """What one more draft of each request costs, by what a plain step takes."""
        verify = self._verify_seconds(num_rows)
        most = verify[-1] + self._propose[num_rows][-1]
        return (most / verify[0] - 1.0) / self._config.num_speculative_tokens

    def see(self, num_rows: int, num_drafts: int, num_proposed: int, seconds: float) -> float:
        """Takes in what a step really took; what is longer by more than a plain one is a hiccup,
        and does not count. Returns what counts."""
        seen, plain = self._at(num_rows), self.plain(num_rows)
        is_plain = not num_drafts and not num_proposed
        expected = plain if is_plain else self.step(num_rows, num_drafts, num_proposed)
        took = min(seconds, expected + plain)
        self._timed = True
        if num_drafts and seen.num_plain > PRIOR_PLAIN:
            seen.num_drafted = min(seen.num_drafted + 1, DRAFT_MEMORY)
            least = plain - expected + seen.excess  # at which it would be as long as a plain one
            excess = seen.excess + (took - expected) / seen.num_drafted
            seen.excess = max(excess, min(seen.excess, least))
        seen.num_unseen += 1
        if is_plain:
            seen.num_plain = min(seen.num_plain + 1, PLAIN_MEMORY)
            seen.factor *= 1.0 + (max(took / plain, 0.5) - 1.0) / seen.num_plain
            seen.excess *= EXCESS_KEPT
            seen.num_unseen = 0
        return took

    def rests(self, num_rows: int) -> bool:
        """Asked once for each step that would have drafts: shall it be plain, for comparison?"""
        seen = self._at(num_rows)
        most = min(UNSEEN_A_REST * seen.num_plain, MOST_UNSEEN)
        if self._timed and not seen.rest and seen.num_unseen >= most:
            is_first = seen.num_plain == PRIOR_PLAIN
            seen.rest, seen.num_unseen = 2 * REST if is_first else REST, 0
        seen.rest = max(0, seen.rest - 1)
        return seen.rest > 0

    def _at(self, num_rows: int) -> _Seen:
        """What was seen of so many requests; at first, what was seen last of others."""
        size = (num_rows - 1).bit_length()
        seen = self._seen.get(size)
        if seen is None:
            seen = self._seen[size] = _Seen(self._latest.factor, self._latest.excess)
        self._latest = seen
        return seen

    def _place(self, num_drafts: int) -> int:
        """Of the smallest of ``draft_counts`` that is not less."""
        counts = enumerate(self._config.draft_counts)
        return next((place for place, count in counts if count >= num_drafts), -1)

    def _verify_seconds(self, num_rows: int) -> tuple[float, ...]:
        known = self._verify.get(num_rows)
        if known is None:
            costs, counts = self._costs, self._config.draft_counts
            shortest = costs.verify[0][0]  # what is extrapolated from noise may even be below 0
            known = self._verify[num_rows] = tuple(
                max(costs.verify_seconds(num_rows, count), shortest) for count in counts
            )
            on_device = self._config.on_device
            self._propose[num_rows] = tuple(
                costs.propose_seconds(num_rows, count) if on_device else 0.0 for count in counts
            )
        return known


def _corrected(plain: float, seconds: float, excess: float) -> float:
    """What a step with drafts takes: what is seen of a few is not believed to be less than half of
    what was measured beyond a ``plain`` one."""
    return max((plain + seconds) / 2, seconds + excess)
