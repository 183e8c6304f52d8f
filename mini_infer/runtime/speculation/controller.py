"""How many drafts a step should have: as many as make most tokens per second, or none.

The rule is that of optimal draft length in speculative decoding (arXiv 2211.17192, section 3.4) on
measured step times, as in SmartSpec (arXiv 2406.14066): a step of R requests with k drafts each
yields R (1 + S_1 + ... + S_k) tokens, S_j being how likely draft j is accepted, and takes
``verify(R, k) + propose(R, k)``.
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil

from mini_infer.core.speculative_config import (
    MAX_DRAFTS,
    MAX_SPECULATING_ROWS,
    SpeculativeConfig,
)
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.speculation.acceptance import Acceptance
from mini_infer.runtime.speculation.step_times import StepTimes

START_GAIN = 1.025
STAY_GAIN = 1.005
"""Predicted speed-up at which drafts begin, as costs and acceptance are known no better, and below
which they end."""
PRIOR_RATE = 0.6
PRIOR_WEIGHT = 2.0
"""What is believed of drafts before any is verified: enough to try, and soon outweighed."""
ALLOWANCE = 0.01
"""Share of plain decoding's time that may be lost to drafts that fail."""
MAX_CREDIT = 2.5
FIRST_CREDIT = 1.0
"""In plain steps: what may be lost at a stretch, and at the start."""
PROBE_SHARE = 0.006
"""Share of plain decoding's time that probes of drafts that lost may take, and a
``MAX_PATIENCE``-th of that once many have failed."""
MAX_PATIENCE = 4.0
PROBED_SAMPLES = 8.0
"""Samples that are remembered while probing."""
JUDGED_STEPS = 16
"""While drafts are off and nothing happens, the decision is made anew every so many steps."""
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
        self._times = StepTimes(config, costs or ASSUMED_COSTS)
        self._acceptance = Acceptance(config.num_speculative_tokens, [PRIOR_RATE], PRIOR_WEIGHT)
        self._verified: Counter[tuple[int, int]] = Counter()
        """Drafts of a request and accepted ones, of the steps since the last decision."""
        self._credit = FIRST_CREDIT * self.plain(1)
        self._num_rows = 1
        """Of the step planned last."""
        self._on = False
        self._wait = self._interval = 0.0
        """Plain steps until the next probe, and between the last one and it."""
        self._patience = 1.0
        self._unjudged = 0
        """Steps until the next decision, where nothing happens."""

    # -- what is asked of it where drafts are proposed on the device

    def num_drafts(self, num_rows: int, most: int = MAX_DRAFTS) -> int:
        """Asked once a step: how many drafts each of ``num_rows`` decoding requests should have in
        the next one, of which it can verify ``most``; one of ``SpeculativeConfig.draft_counts``,
        or ``most``."""
        if most < 1 or not 1 <= num_rows <= MAX_SPECULATING_ROWS:
            return 0
        if not self._config.adaptive:
            return min(self._config.num_speculative_tokens, most)
        self._unjudged -= 1
        is_new = self._take_in_verified() or num_rows != self._num_rows or self._unjudged <= 0
        self.pass_step(num_rows)
        if not (self._on or is_new or self._wait <= 1):
            self._wait -= 1
            return 0
        self._unjudged = JUDGED_STEPS
        expected = [num_rows * share for share in self._acceptance.survival()[:most]]
        count, gain = self.best(num_rows, expected)
        self._on = count > 0 and gain > (STAY_GAIN if self._on else START_GAIN)
        if not self._on:
            count = self._probe(num_rows, most)
        elif self._credit <= 0 or self._times.rests(num_rows):
            count = 0
        if count:
            self._credit += self.plain(num_rows) - self._times.step(num_rows, count, count)
        return count

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in that a request's drafts were verified. It counts with the next decision."""
        self._verified[num_drafts, num_accepted] += 1

    def _take_in_verified(self) -> bool:
        """Were there any?"""
        if not self._verified:
            return False
        self._acceptance.record_all(self._verified, memory=96 + 4 * self._num_rows)
        self.earn(sum(accepted * times for (_, accepted), times in self._verified.items()))
        num_good = sum(times for (_, accepted), times in self._verified.items() if accepted)
        if num_good:  # of all rows: no wait for the next probe, and half the patience
            self._wait -= self._interval * num_good / self._num_rows
            self._patience = max(1.0, self._patience * 4.0 ** (-num_good / self._num_rows))
        self._verified.clear()
        return True

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
        plain = self.plain(num_rows)
        best, best_gain = 0, 0.0
        counts = self._config.draft_counts
        for count, seconds in zip(counts, self._times.drafted(num_rows), strict=True):
            if count > len(expected):
                break
            tokens = 1.0 + sum(expected[:count]) / num_rows
            gain = tokens * plain / (plain + share * (seconds - plain))
            if gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain

    def pass_step(self, num_rows: int) -> None:
        """A step passes: its share is paid in."""
        self._num_rows = num_rows
        self._pay_in(ALLOWANCE * self.plain(num_rows))

    def end_step(
        self, num_rows: int, num_drafts: int, seconds: float | None, num_proposed: int = 0
    ) -> None:
        """A step is over. What drafts in it took beyond a plain one is paid by now: a device's were
        charged as they were decided on, so it is what they took beyond that.

        Args:
            seconds: what it really took; None where that is not known. Costs that were measured at
                start-up know neither this text's length nor all that the host does.
        """
        if not self._measured:
            seconds = None
        if not num_drafts and not num_proposed:
            if seconds is not None:
                self._times.see(num_rows, 0, 0, seconds)
            return
        expected = took = self._times.step(num_rows, num_drafts, num_proposed)
        charged = expected if self._config.on_device else self.plain(num_rows)
        if seconds is not None:
            took = self._times.see(num_rows, num_drafts, num_proposed, seconds)
        self._credit += charged - took

    def pay(self, num_rows: int, seconds: float | None) -> None:
        """A step without drafts took so long, as the host proposed some for the next one."""
        plain = self.plain(num_rows)
        if seconds is not None and self._measured:
            self._credit -= min(max(seconds - plain, 0.0), MAX_CREDIT * plain)

    def earn(self, num_accepted: int) -> None:
        """A request's drafts were accepted: what plain steps would have taken is paid in."""
        self._pay_in(num_accepted * self.plain(self._num_rows) / self._num_rows)

    @property
    def has_credit(self) -> bool:
        return self._credit > 0

    def can_start(self, num_rows: int) -> bool:
        """Is there credit for a host's drafts that fail at once? By the time that is known, the
        next ones are on their way."""
        plain = self.plain(num_rows)
        price = 2 * (self._times.step(num_rows, 1, 0) - plain)
        return self._credit >= min(price, MAX_CREDIT * plain)

    def rests(self, num_rows: int) -> bool:
        """Asked once for each step that would have a host's drafts: shall it be plain, as nobody
        knows any more what plain ones take?"""
        return self._times.rests(num_rows)

    def relative_cost(self, num_rows: int) -> float:
        """What one more draft of one request costs, by what one more token is worth."""
        return self._times.draft_cost(num_rows)

    def plain(self, num_rows: int) -> float:
        """Seconds of a plain step, or by another unit where no costs were measured."""
        return self._times.plain(num_rows)

    # -- the speed-up, for people

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """What a step takes that verifies so many drafts of each request, their proposing included;
        0 where no costs were measured."""
        if not self._measured:
            return 0.0
        proposed = num_drafts if self._config.on_device else 0
        return self._times.step(num_rows, num_drafts, proposed)

    def plain_seconds(self, num_rows: int) -> float:
        """What a plain step takes; 0 where no costs were measured."""
        return self.plain(num_rows) if self._measured else 0.0

    def _probe(self, num_rows: int, most: int) -> int:
        """Drafts of a step that is predicted to lose: none, but now and then a few, to notice when
        that changes. Not where even the best drafter would lose."""
        self._acceptance.limit(PROBED_SAMPLES)
        all_accepted = [float(num_rows)] * min(self._config.num_speculative_tokens, most)
        _, gain = self.best(num_rows, all_accepted)
        self._wait -= 1
        if gain < START_GAIN:
            self._wait = max(self._wait, JUDGED_STEPS)
        if self._wait > 0 or not self.has_credit:
            return 0
        count = self._config.draft_counts[1]
        loss = self._times.step(num_rows, count, count) / self.plain(num_rows) - 1
        self._wait = self._interval = self._patience * ceil(max(loss, 0.0) / PROBE_SHARE)
        self._patience = min(2 * self._patience, MAX_PATIENCE)
        return count

    def _pay_in(self, seconds: float) -> None:
        self._credit = min(self._credit + seconds, MAX_CREDIT * self.plain(self._num_rows))
