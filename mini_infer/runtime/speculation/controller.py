"""How many drafts a step should have: as many as make most tokens per second, or none.

The rule is that of optimal draft length in speculative decoding (arXiv 2211.17192, section 3.4) on
measured step times, as in SmartSpec (arXiv 2406.14066): a step of R requests with k drafts each
yields R (1 + S_1 + ... + S_k) tokens, S_j being how likely draft j is accepted, and takes
``verify(R, k) + propose(R, k)``.
"""

from collections.abc import Sequence
from math import ceil

from mini_infer.core.speculative_config import (
    MAX_DRAFTS,
    MAX_SPECULATING_ROWS,
    SpeculativeConfig,
)
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.speculation.acceptance import Acceptance

START_GAIN = 1.025
STAY_GAIN = 1.005
"""Predicted speed-up at which drafts begin, as costs and acceptance are known no better, and below
which they end."""
PRIOR_RATE = 0.6
PRIOR_WEIGHT = 2.0
"""What is believed of drafts before any is verified: enough to try, and soon outweighed."""
ALLOWANCE = 0.008
"""Share of plain decoding's time that may be lost to drafts that fail."""
MAX_CREDIT = 4.0
FIRST_CREDIT = 1.0
"""In plain steps: what may be lost at a stretch, and at the start."""
PROBE_SHARE = 0.006
"""Share of plain decoding's time that probes of drafts that lost may take, and a
``MAX_PATIENCE``-th of that once many have failed."""
MAX_PATIENCE = 4.0
PROBED_SAMPLES = 8.0
"""Samples that are remembered while probing."""
PRIOR_STEPS = 3
PLAIN_MEMORY = 64
DRAFT_MEMORY = 16
"""In steps: what those that were measured at start-up count for, beside those that are timed; and
how many of the latter are remembered."""
EXCESS_KEPT = 0.998
"""By each plain step, of what drafts took longer: nobody knows whether they still would."""
ASSUMED_COSTS = StepCosts(
    rows=(1, MAX_SPECULATING_ROWS),
    drafts=(0, 16),
    verify=((1.0, 1.16), (1.63, 1.63 + 0.16 * MAX_SPECULATING_ROWS)),
    propose=((0.0, 1.6), (0.0, 1.6)),
)
"""Where no costs were measured: a token more makes a step 1 % longer, a draft takes a tenth of a
step. The unit is a plain step of one request."""


class DraftController:
    """Decides from what was accepted so far and from what steps cost. Deterministic: the same
    verifications, and times of steps, in the same order lead to the same decisions.

    Whatever acceptance does, time is lost within bounds: a credit pays for what drafts cost beyond
    a plain step, and accepted drafts and a small share of plain time pay into it. Without credit
    there are no drafts. By the costs it is given, it is therefore never slower than plain decoding
    by more than ``ALLOWANCE`` plus ``FIRST_CREDIT`` steps in all.
    """

    def __init__(self, config: SpeculativeConfig, costs: StepCosts | None) -> None:
        self._config = config
        self._measured = costs is not None
        self._costs = costs or ASSUMED_COSTS
        self._factor = 1.0
        """What plain steps take, by what they should by the costs."""
        self._excess = 0.0
        """Seconds that steps with a host's drafts take beyond that: where the host has more to do
        than the device's time hides."""
        self._num_plain = self._num_drafted = PRIOR_STEPS
        """Steps that the factor and the excess are the mean of."""
        self._seconds: dict[int, tuple[float, ...]] = {}
        """Of each number of requests: what a step takes with each of ``draft_counts``."""
        self._acceptance = Acceptance(config.num_speculative_tokens, [PRIOR_RATE], PRIOR_WEIGHT)
        self._credit = FIRST_CREDIT * self._plain(1)
        self._num_rows = 1
        """Of the step planned last."""
        self._on = False
        self._wait = self._interval = 0.0
        """Plain steps until the next probe, and between the last one and it."""
        self._patience = 1.0

    # -- what is asked of it where drafts are proposed on the device

    def num_drafts(self, num_rows: int, most: int = MAX_DRAFTS) -> int:
        """Asked once a step: how many drafts each of ``num_rows`` decoding requests should have in
        the next one, of which it can verify ``most``; one of ``SpeculativeConfig.draft_counts``,
        or ``most``."""
        if most < 1 or not 1 <= num_rows <= MAX_SPECULATING_ROWS:
            return 0
        if not self._config.adaptive:
            return min(self._config.num_speculative_tokens, most)
        self.pass_step(num_rows)
        expected = [num_rows * share for share in self._acceptance.survival()[:most]]
        count, gain = self.best(num_rows, expected)
        self._on = count > 0 and gain > (STAY_GAIN if self._on else START_GAIN)
        if not self._on:
            count = self._probe(num_rows, most)
        elif self._credit <= 0:
            count = 0
        if count:
            self.charge(num_rows, count)
        return count

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in that a request's drafts were verified."""
        self._acceptance.record(num_drafts, num_accepted, memory=96 + 4 * self._num_rows)
        self.earn(num_accepted)
        if num_accepted:  # of all rows: no wait for the next probe, and half the patience
            self._wait -= self._interval / self._num_rows
            self._patience = max(1.0, self._patience * 4.0 ** (-1 / self._num_rows))

    # -- what a host's drafts need in addition

    def best(
        self, num_rows: int, expected: Sequence[float], share: float = 1.0
    ) -> tuple[int, float]:
        """The number of drafts with which a step makes most tokens per second, none being among the
        choices, and how many times those of a plain step that is.

        Args:
            expected: for each position, how many drafts there will be accepted, of all requests;
                there are no more drafts than positions.
            share: of the steps so planned, those that will have any draft.
        """
        plain = self._plain(num_rows)
        best, best_gain = 0, 0.0
        for count, seconds in zip(
            self._config.draft_counts, self._step_seconds(num_rows), strict=True
        ):
            if count > len(expected):
                break
            tokens = 1.0 + sum(expected[:count]) / num_rows
            extra = self._factor * seconds + self._excess - plain if count else 0.0
            gain = tokens * plain / (plain + share * extra)
            if gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain

    def pass_step(self, num_rows: int) -> None:
        """A step passes: its share is paid in."""
        self._num_rows = num_rows
        self._pay_in(ALLOWANCE * self._plain(num_rows))

    def charge(self, num_rows: int, num_drafts: int) -> None:
        """A step has drafts: what it takes beyond a plain one is paid."""
        self._credit += self._plain(num_rows) - self._lookup(num_rows, num_drafts)

    def end_step(self, num_rows: int, num_drafts: int, seconds: float | None) -> None:
        """A step is over. If a host's drafts were in it, what it took beyond a plain one is paid.

        Args:
            seconds: what it really took; None where that is not known. Costs that were measured at
                start-up know neither this text's length nor all that the host does.
        """
        plain, expected = self._plain(num_rows), self._with_excess(num_rows, num_drafts)
        took = expected
        if seconds is not None and self._measured:
            took = min(seconds, expected + plain)  # what is longer is a hiccup
            if num_drafts:
                self._num_drafted = min(self._num_drafted + 1, DRAFT_MEMORY)
                self._excess = max(0.0, self._excess + (took - expected) / self._num_drafted)
            else:
                self._num_plain = min(self._num_plain + 1, PLAIN_MEMORY)
                self._factor *= 1.0 + (max(took / plain, 0.5) - 1.0) / self._num_plain
                self._excess *= EXCESS_KEPT
        if num_drafts:
            self._credit += plain - took

    def earn(self, num_accepted: int) -> None:
        """A request's drafts were accepted: what plain steps would have taken is paid in."""
        self._pay_in(num_accepted * self._plain(self._num_rows) / self._num_rows)

    @property
    def has_credit(self) -> bool:
        return self._credit > 0

    def can_start(self, num_rows: int) -> bool:
        """Is there credit for a host's drafts that fail at once? By the time that is known, the
        next ones are on their way."""
        price = 2 * (self._with_excess(num_rows, 1) - self._plain(num_rows))
        return self._credit >= min(price, MAX_CREDIT * self._plain(num_rows))

    def relative_cost(self, num_rows: int) -> float:
        """What one more draft of one request costs, by what one more token is worth."""
        most, plain = self._factor * self._step_seconds(num_rows)[-1], self._plain(num_rows)
        return (most - plain) / plain / self._config.num_speculative_tokens

    # -- the speed-up, for people

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """What a step takes that verifies so many drafts of each request, their proposing included;
        0 where no costs were measured."""
        return self._with_excess(num_rows, num_drafts) if self._measured else 0.0

    def plain_seconds(self, num_rows: int) -> float:
        """What a plain step takes; 0 where no costs were measured."""
        return self._plain(num_rows) if self._measured else 0.0

    def _probe(self, num_rows: int, most: int) -> int:
        """Drafts of a step that is predicted to lose: none, but now and then a few, to notice when
        that changes. Not where even the best drafter would lose."""
        self._acceptance.limit(PROBED_SAMPLES)
        all_accepted = [float(num_rows)] * min(self._config.num_speculative_tokens, most)
        _, gain = self.best(num_rows, all_accepted)
        self._wait -= 1
        if gain < START_GAIN or self._wait > 0 or not self.has_credit:
            return 0
        count = self._config.draft_counts[1]
        loss = self._lookup(num_rows, count) / self._plain(num_rows) - 1
        self._wait = self._interval = self._patience * ceil(max(loss, 0.0) / PROBE_SHARE)
        self._patience = min(2 * self._patience, MAX_PATIENCE)
        return count

    def _pay_in(self, seconds: float) -> None:
        self._credit = min(self._credit + seconds, MAX_CREDIT * self._plain(self._num_rows))

    def _plain(self, num_rows: int) -> float:
        return self._factor * self._step_seconds(num_rows)[0]

    def _lookup(self, num_rows: int, num_drafts: int) -> float:
        """Of a step whose requests have up to ``num_drafts`` drafts."""
        counts = self._config.draft_counts
        place = next((place for place, count in enumerate(counts) if count >= num_drafts), -1)
        return self._factor * self._step_seconds(num_rows)[place]

    def _with_excess(self, num_rows: int, num_drafts: int) -> float:
        return self._lookup(num_rows, num_drafts) + (self._excess if num_drafts else 0.0)

    def _step_seconds(self, num_rows: int) -> tuple[float, ...]:
        known = self._seconds.get(num_rows)
        if known is None:
            costs, proposes = self._costs, self._config.on_device
            shortest = costs.verify[0][0]  # what is extrapolated from noise may even be below 0
            known = self._seconds[num_rows] = tuple(
                max(costs.verify_seconds(num_rows, count), shortest)
                + (costs.propose_seconds(num_rows, count) if proposes else 0.0)
                for count in self._config.draft_counts
            )
        return known
