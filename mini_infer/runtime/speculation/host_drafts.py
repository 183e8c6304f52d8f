"""When a host's proposer is asked, and what of its answers is verified.

A host's drafts go on from tokens that it knows. While they are on, no step is scheduled while
another is in flight; so they have to be worth more than that overlap. While they are off, the
proposer is tried in the shadow: it proposes now and then, what comes is compared with that, and no
step is longer for it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from mini_infer.core.errors import ProposerError
from mini_infer.core.request import Request
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS, SpeculativeConfig
from mini_infer.runtime.speculation.acceptance import Acceptance
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.proposer import Proposer

START_GAIN = 1.05
STAY_GAIN = 1.01
"""Predicted speed-up at which drafts are switched on, and below which off again."""
MAX_TRIAL_INTERVAL = 16
"""Tokens between trials of a request for which the proposer was wrong or had no idea."""
OWN_WEIGHT = 4.0
OWN_MEMORY = 16.0
"""In verifications: how long all requests' acceptance counts for one's own, and how long that is
remembered."""
YIELD_MEMORY = 8.0
"""In steps of all requests: how long it is remembered what proposals brought."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One request: its last proposal, until it is known what came, and how such fared."""

    acceptance: Acceptance
    start: int = 0
    """Known tokens when the last proposal was made."""
    drafts: tuple[int, ...] = ()
    due: int = 0
    """Known tokens at which it is to be looked at again."""
    interval: int = 1
    survival: list[float] = field(default_factory=list)
    """Of each position, how likely a draft there is accepted."""


class HostDrafts:
    """Belongs to one engine. Deterministic: decisions follow from tokens and step costs alone.

    A proposer that fails is reported once and never asked again; its requests go on without.
    """

    def __init__(
        self, config: SpeculativeConfig, proposer: Proposer, controller: DraftController
    ) -> None:
        self._num_drafts = config.num_speculative_tokens
        self._adaptive = config.adaptive
        self._proposer = proposer
        self._controller = controller
        self._rows: WeakKeyDictionary[Request, _Row] = WeakKeyDictionary()
        self._yield = Acceptance(self._num_drafts, prior_weight=4.0)
        """Of all proposals, also those that were empty: these count as wrong from the start."""
        self._offers = Acceptance(1, prior_weight=4.0)
        """Which proposals were not empty."""
        self._num_rows = 1
        self._on = not self._adaptive
        self._failed = False

    def drafting(self, num_rows: int) -> bool:
        """Should the next step, of so many decoding requests, have drafts? Then it is to be
        scheduled when nothing is in flight, with what ``propose`` says."""
        self._num_rows = num_rows
        if self._failed or not 1 <= num_rows <= MAX_SPECULATING_ROWS:
            return False
        if self._adaptive:
            self._controller.pass_step(num_rows)
            self._on = self._worth_it(num_rows)
        return self._on

    def _worth_it(self, num_rows: int) -> bool:
        expected = [num_rows * share for share in self._yield.survival(0.0)]
        (offered,) = self._offers.rates(0.0)
        share = 1.0 - (1.0 - offered) ** num_rows  # of steps: where any request has drafts
        _, gain = self._controller.best(num_rows, expected, share)
        return self._controller.has_credit and gain > (STAY_GAIN if self._on else START_GAIN)

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[tuple[int, ...]]:
        """The drafts of each request's next step, at most ``room`` of each: as many as are worth
        their time, by what was accepted of its own and of everybody's."""
        proposals = self._ask(requests)
        if proposals is None:
            return [()] * len(requests)
        if not self._adaptive:
            return [drafts[:most] for drafts, most in zip(proposals, room, strict=True)]
        for request, drafts in zip(requests, proposals, strict=True):
            row = self._row(request)
            self._begin(row, len(request.token_ids), drafts)
            row.due = row.start + 1
        return self._cut(requests, proposals, room)

    def _cut(
        self,
        requests: Sequence[Request],
        proposals: Sequence[tuple[int, ...]],
        room: Sequence[int],
    ) -> list[tuple[int, ...]]:
        """Leaves out what is not worth its time: a draft of one request costs its share of what
        drafts of all would, and brings a token with the probability that it is accepted."""
        num_rows, controller = len(requests), self._controller
        dearest = controller.relative_cost(num_rows)
        expected = [0.0] * self._num_drafts
        rates = controller.rates()
        lengths = []
        for request, drafts, most in zip(requests, proposals, room, strict=True):
            row = self._rows[request]
            if drafts and not row.survival:
                row.survival = row.acceptance.survival(rates)
            length = 0
            for likelihood in row.survival[: min(len(drafts), most)]:
                if likelihood < dearest:
                    break
                expected[length] += likelihood
                length += 1
            lengths.append(length)
        count, _ = controller.best(num_rows, expected)
        lengths = [min(length, count) for length in lengths]
        controller.charge(num_rows, max(lengths, default=0))
        return [drafts[:length] for drafts, length in zip(proposals, lengths, strict=True)]

    def verified(self, request: Request, num_drafts: int, num_accepted: int, num_rows: int) -> None:
        """A step verified drafts of ``request``, whose ``token_ids`` have what it brought."""
        if self._adaptive:
            self._controller.earn(num_accepted)
            self._settle(self._row(request), request.token_ids)

    def watch(self, request: Request) -> None:
        """A step without drafts of ``request`` brought it a token: the shadow trial."""
        if not self._adaptive or self._failed or self._num_rows > MAX_SPECULATING_ROWS:
            return
        row = self._row(request)
        num_known = len(request.token_ids)
        if num_known < row.due:
            return
        self._settle(row, request.token_ids)
        if not self._on and num_known >= row.due:
            proposals = self._ask([request])
            if proposals is not None:
                self._begin(row, num_known, proposals[0])

    def _ask(self, requests: Sequence[Request]) -> list[tuple[int, ...]] | None:
        """A proposal for each; None where the proposer failed."""
        try:
            proposals = self._proposer.propose(requests, self._num_drafts)
        except ProposerError as error:
            self._failed = True
            logger.error("%s; the engine goes on without it: mend it, and start anew", error)
            return None
        return [tuple(drafts) for drafts in proposals]

    def _row(self, request: Request) -> _Row:
        row = self._rows.get(request)
        if row is None:
            row = self._rows[request] = _Row(Acceptance(self._num_drafts, OWN_WEIGHT))
            row.interval = self._num_drafts
        return row

    def _begin(self, row: _Row, num_known: int, drafts: tuple[int, ...]) -> None:
        """A proposal was made; if it is empty, that is all there is to know about it."""
        row.start, row.drafts = num_known, drafts
        row.due = num_known + len(drafts)
        if not drafts:
            self._learn(row, num_drafts=0, num_right=0)

    def _settle(self, row: _Row, token_ids: list[int]) -> None:
        """Compares the last proposal with what came, as far as it is known."""
        if not row.drafts:
            return
        came = token_ids[row.start : row.start + len(row.drafts)]
        num_right = 0
        for draft, token_id in zip(row.drafts, came, strict=False):
            if draft != token_id:
                break
            num_right += 1
        row.drafts = ()
        row.acceptance.record(len(came), num_right, OWN_MEMORY)
        row.survival = row.acceptance.survival(self._controller.rates())
        self._controller.observe(len(came), num_right)
        self._learn(row, len(came), num_right)

    def _learn(self, row: _Row, num_drafts: int, num_right: int) -> None:
        """Takes one proposal into the yield, and sets when the next trial is due.

        With drafts on there would have been a proposal behind each wrong draft. A trial stands for
        all those until the next trial: else long right ones, which take few steps, would make the
        yield look better than it is.
        """
        if num_right:
            row.interval = self._num_drafts
            gap = max(num_right + 1, num_drafts)
        else:
            gap = row.interval
            row.interval = max(self._num_drafts, min(2 * gap, MAX_TRIAL_INTERVAL))
        row.due = row.start + gap
        weight = 1.0 if self._on else gap / (num_right + 1)
        memory = YIELD_MEMORY * (2 + self._num_rows)
        self._offers.record(1, num_drafts > 0, memory, weight)
        self._yield.record(max(1, num_drafts), num_right, memory, weight)
