"""When a host's proposer is asked, and what of its answers is verified.

A host's drafts go on from tokens that it knows. While they are on, no step is scheduled while
another is in flight; so they have to be worth more than that overlap. While they are off, the
proposer is tried in the shadow: it proposes now and then, what comes is compared with that, and no
step is longer for it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from mini_infer.core.errors import ProposerError
from mini_infer.core.request import Request
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS, SpeculativeConfig
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.draft_record import DraftRecord
from mini_infer.runtime.speculation.proposer import Proposer

START_GAIN = 1.025
STAY_GAIN = 0.99
"""Predicted speed-up at which drafts are switched on, and below which off again. They are not given
up for a few steps in which they lost a little."""
TRIED_ROWS = 8
STRETCH = 32
"""In the shadow, so many requests are tried at a time, and of more each in its turn, for so many
tokens."""
PATIENCE = 8
MAX_PAUSE = 16
"""Behind so many proposals that failed in succession, each further one is followed by a pause of a
token; of two behind twice as many, and so on."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One request: its last proposal, until it is known what came, and how all of them fared."""

    record: DraftRecord
    survival: list[float]
    expected: list[float]
    """Those of ``record``."""
    start: int = 0
    """Known tokens when the last proposal was made."""
    drafts: tuple[int, ...] = ()
    due: int = 0
    """Known tokens at which to make the next trial."""
    num_failures: int = 0
    """Proposals since one that was right at its first draft."""


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
        self._latest = DraftRecord(self._num_drafts)
        """Of the request that was judged last: with what a new one begins."""
        self._num_rows = 1
        self._forecast = _Forecast(self._num_drafts)
        self._on = not self._adaptive
        self._failed = False

    def drafting(self, num_rows: int) -> bool:
        """Should the next step, of so many decoding requests, have drafts? Then it is to be
        scheduled when nothing is in flight, with what ``propose`` says."""
        self._num_rows = num_rows
        if self._failed or not 1 <= num_rows <= MAX_SPECULATING_ROWS:
            return False
        if self._adaptive:
            expected, share = self._forecast.of_step(num_rows)
            _, gain = self._controller.best(num_rows, expected, share)
            needed = STAY_GAIN if self._on else START_GAIN
            self._on = gain > needed and self._controller.has_credit
        return self._on

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[tuple[int, ...]]:
        """The drafts of each request's next step, at most ``room`` of each (none where that is
        below 0): as many as are worth their time, by how those before fared."""
        room = [max(0, most) for most in room]
        proposals = self._ask(requests)
        if proposals is None:
            return [()] * len(requests)
        if not self._adaptive:
            return [drafts[:most] for drafts, most in zip(proposals, room, strict=True)]
        rows = [self._row(request) for request in requests]
        for row, request, drafts in zip(rows, requests, proposals, strict=True):
            self._begin(row, len(request.token_ids), drafts)
        lengths = self._lengths(rows, room)
        self._controller.charge(len(rows), max(lengths, default=0))
        return [drafts[:length] for drafts, length in zip(proposals, lengths, strict=True)]

    def verified(self, request: Request, num_drafts: int, num_accepted: int, num_rows: int) -> None:
        """A step of ``num_rows`` requests verified drafts of this one, whose ``token_ids`` have
        what it brought."""
        if self._adaptive:
            row = self._row(request)
            self._settle(row, request.token_ids)
            self._forecast.add(row)
            self._controller.earn(num_accepted)

    def watch(self, request: Request) -> None:
        """A step without drafts of ``request`` brought it a token. Time for a trial?"""
        if not self._adaptive or self._failed or self._num_rows > MAX_SPECULATING_ROWS:
            return
        row = self._row(request)
        self._forecast.add(row)
        num_known = len(request.token_ids)
        if row.drafts and num_known > row.start:
            open_ended = not self._on and num_known < row.start + len(row.drafts)
            if open_ended and row.drafts[num_known - row.start - 1] == request.token_ids[-1]:
                return  # it may be right to its end
            self._settle(row, request.token_ids)
        if self._on or num_known < row.due:
            return
        if (num_known // STRETCH + request.arrival) % max(1, self._num_rows // TRIED_ROWS):
            row.due = num_known + STRETCH - num_known % STRETCH  # now it is other requests' turn
            return
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

    def _lengths(self, rows: Sequence[_Row], room: Sequence[int]) -> list[int]:
        """How many of each request's drafts to verify. One costs its share of what a step takes
        longer if all have one, and brings a token with the likelihood of its acceptance."""
        cost = self._controller.relative_cost(len(rows))
        expected = [0.0] * self._num_drafts
        lengths = []
        for row, most in zip(rows, room, strict=True):
            length = 0
            for likelihood in row.survival[: min(len(row.drafts), most)]:
                if likelihood < cost:
                    break
                expected[length] += likelihood
                length += 1
            lengths.append(length)
        count, _ = self._controller.best(len(rows), expected)
        return [min(length, count) for length in lengths]

    def _row(self, request: Request) -> _Row:
        row = self._rows.get(request)
        if row is None:
            record = DraftRecord(self._num_drafts, self._latest)
            row = self._rows[request] = _Row(record, record.survival(), record.expected())
        return row

    def _begin(self, row: _Row, num_known: int, drafts: tuple[int, ...]) -> None:
        """A proposal was made; if it is empty, that is all there is to know about it."""
        row.start, row.drafts = num_known, drafts
        if not drafts:
            self._learn(row, 0, 0, 0)

    def _settle(self, row: _Row, token_ids: list[int]) -> None:
        """Compares the last proposal with what came, as far as it is known."""
        drafts, row.drafts = row.drafts, ()
        came = token_ids[row.start : row.start + len(drafts)]
        num_right = 0
        for draft, token_id in zip(drafts, came, strict=False):
            if draft != token_id:
                break
            num_right += 1
        self._learn(row, len(drafts), len(came), num_right)

    def _learn(self, row: _Row, num_drafts: int, num_judged: int, num_right: int) -> None:
        """Records what came of a proposal, and when the next trial is due.

        Where no trial is made for a while, as many failed, the last one stands for all those that
        would have failed.
        """
        row.num_failures = 0 if num_right else row.num_failures + 1
        gap = 1 + num_right + min(row.num_failures // PATIENCE, MAX_PAUSE)
        row.due = row.start + gap
        weight = 1.0 if self._on or num_right else float(gap)
        row.record.add(num_drafts, num_judged, num_right, weight)
        row.survival, row.expected = row.record.survival(), row.record.expected()
        self._latest = row.record


class _Forecast:
    """What drafts would bring the next step, by the requests of the last one."""

    def __init__(self, num_positions: int) -> None:
        self._expected = [0.0] * num_positions
        self._offered = 0.0
        """Of a request: what ``_Row.expected`` and ``DraftRecord.offered`` are on average."""
        self._rows: list[_Row] = []

    def add(self, row: _Row) -> None:
        self._rows.append(row)

    def of_step(self, num_rows: int) -> tuple[list[float], float]:
        """Of each position, how many drafts of so many requests would be accepted there; and how
        likely any request has one."""
        if self._rows:
            count = len(self._rows)
            columns = zip(*(row.expected for row in self._rows), strict=True)
            self._expected = [sum(column) / count for column in columns]
            self._offered = sum(row.record.offered for row in self._rows) / count
            self._rows.clear()
        return [num_rows * share for share in self._expected], 1 - (1 - self._offered) ** num_rows
