"""When a host's proposer is asked, and what of its answers is verified.

A host's proposer goes on from tokens that it knows. While a step is in flight, the last ones are
not known yet: so it is asked for more, and what it says first stands for those in flight. Where it
is wrong about them, the drafts behind fail too; but no step ever waits for the host. While drafts
are off, the proposer is tried in the shadow: it proposes now and then, what comes is compared with
that, and no step is longer for it.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from mini_infer.core.errors import ProposerError
from mini_infer.core.request import Request
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS, SpeculativeConfig
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.draft_path import DraftPath
from mini_infer.runtime.speculation.draft_record import DraftRecord
from mini_infer.runtime.speculation.proposer import Proposer

START_GAIN = 1.025
"""Predicted speed-up at which drafts are switched on. They stay on as long as there is any."""
TRIED_ROWS = 4
STRETCH = 32
"""In the shadow, so many requests are tried at a time, and of more each in its turn, for so many
steps."""
LOOK_SHARE = 0.25
LOOK_SECONDS = 10e-6
TOKEN_SECONDS = 0.4e-6
"""Share of a plain step's time, of all its requests together divided by their number, that the host
may look at what it would propose: one request's drafts gain most, and its host idles. What a look
takes is assumed: so much, and so much for each token that came since the last one."""
PATIENCE = 8
MAX_PAUSE = 16
"""Behind so many proposals that failed in succession, each further one is followed by a pause of a
token; of two behind twice as many, and so on."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One request: what was proposed, until it is known what came, and how all of it fared."""

    record: DraftRecord
    survival: list[float]
    expected: list[float]
    """Those of ``record``."""
    trial: DraftPath | None = None
    """In the shadow."""
    sent: deque[DraftPath] = field(default_factory=deque)
    """Those of steps in flight that verify drafts, the oldest first."""
    due: int = 0
    """Known tokens at which to make the next trial."""
    num_failures: int = 0
    """Proposals since one that was right at its first draft."""
    num_read: int = 0
    """Tokens when the proposer was asked last."""


class HostDrafts:
    """Belongs to one engine. Deterministic: decisions follow from tokens and steps' times alone.

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
        self._forecast = _Forecast(self._num_drafts)
        self._judged_rows = 0
        """Requests of the step that was judged last."""
        self._gain = 0.0
        """What drafts promise for such a step."""
        self._trials: list[tuple[Request, _Row]] = []
        self._turn = self._num_steps = 0
        """The first request that is tried in this stretch, and the steps of it."""
        self._time_to_look = LOOK_SECONDS
        """Seconds; a look that took longer than there was is paid later."""
        self._on = not self._adaptive
        self._failed = False

    def drafting(self, num_rows: int) -> bool:
        """Should the next step, of so many decoding requests, have drafts?"""
        if self._failed or not 1 <= num_rows <= MAX_SPECULATING_ROWS:
            return False
        if not self._adaptive:
            return True
        controller = self._controller
        if self._on or self._forecast.is_new or num_rows != self._judged_rows:
            self._judged_rows = num_rows
            count, self._gain = controller.best(num_rows, *self._forecast.of_step(num_rows))
            self._on = self._on and count > 0
        if self._on:
            self._on = controller.has_credit
        else:
            self._on = self._gain > START_GAIN and controller.can_start(num_rows)
        return self._on and not controller.rests(num_rows)

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[tuple[int, ...]]:
        """The drafts of each request's next step, at most ``room`` of each (none where that is
        below 0): as many as are worth their time, by how those before fared."""
        drafts: list[tuple[int, ...]] = [()] * len(requests)
        asked = self._worth_it(requests)
        room, requests = [room[index] for index in asked], [requests[index] for index in asked]
        paths = self._ask(requests)
        if paths is None:
            return drafts
        rows = [self._row(request) for request in requests]
        fitting = [
            path.fits_behind(row.sent, request)
            for row, request, path in zip(rows, requests, paths, strict=True)
        ]
        lengths = [
            max(0, min(len(path.drafts), most)) if fits else 0
            for path, most, fits in zip(paths, room, fitting, strict=True)
        ]
        if self._adaptive:
            lengths = self._lengths(rows, lengths)
        for index, request, row, path, length, fits in zip(
            asked, requests, rows, paths, lengths, fitting, strict=True
        ):
            path.num_sent = length
            if length:
                row.sent.append(path)
                drafts[index] = path.drafts[:length]
            elif fits and row.trial is None:
                self._begin(request, row, path)
        return drafts

    def verified(self, request: Request, place: int, num_accepted: int) -> None:
        """A step verified drafts of this request, the first of which was to stand at ``place``; its
        ``token_ids`` have what it brought."""
        row = self._row(request)
        while row.sent and row.sent[0].first_place <= place:
            path = row.sent.popleft()
            if path.first_place == place:  # else it was never sent, as its blocks had no room
                if path.is_lost:
                    self._learn(row, path.start, 0, 0, 0)
                else:
                    self._settle(row, path, request.token_ids)
                if num_accepted < path.num_sent:
                    for later in row.sent:
                        later.is_lost = True
        row.trial = None
        if self._adaptive:
            self._controller.earn(num_accepted)

    def watch(self, requests: Sequence[Request]) -> None:
        """A step brought each of these requests a token or more. What of it was foretold in the
        shadow? Time for more trials?

        Called for each step, and so takes no time for requests that are not in a trial.
        """
        num_rows = len(requests)
        if not self._adaptive or self._failed or not 1 <= num_rows <= MAX_SPECULATING_ROWS:
            return
        plain = self._controller.plain(num_rows)
        share = LOOK_SHARE * plain / num_rows
        self._time_to_look = min(self._time_to_look + share, STRETCH * share)
        if self._trials:
            self._trials = [trial for trial in self._trials if self._goes_on(*trial)]
        self._num_steps += 1
        if self._num_steps % STRETCH == 0:
            self._turn += TRIED_ROWS
        if not self._on:
            for place in range(self._turn, self._turn + min(TRIED_ROWS, num_rows)):
                if self._time_to_look <= 0:
                    break
                self._try(requests[place % num_rows])
        if self._on or self._num_steps % (1 + num_rows // TRIED_ROWS) == 0:
            self._forecast.take_in(requests, self._rows)

    def _goes_on(self, request: Request, row: _Row) -> bool:
        """Is a trial not over yet? Else takes in what it showed."""
        if row.trial is None or request.finished:
            return False
        num_came = len(request.token_ids) - row.trial.first_place
        if num_came <= 0:
            return True
        num_right = row.trial.num_right(request.token_ids)
        if num_right == num_came < len(row.trial.drafts):
            return True  # it may be right to its end
        self._settle(row, row.trial, request.token_ids)
        row.trial = None
        return False

    def _try(self, request: Request) -> None:
        """Begins a trial, where it is time for one."""
        row = self._row(request)
        num_known = len(request.token_ids)
        if row.trial is not None or num_known < row.due or request.num_in_flight_drafts:
            return
        paths = self._ask([request])
        if paths is not None:
            self._begin(request, row, paths[0])

    def _worth_it(self, requests: Sequence[Request]) -> list[int]:
        """Of which requests shall the proposer be asked for drafts, while they are on? Not of those
        of which most failed of late, nor of many at a time that it never read."""
        if not self._adaptive:
            return list(range(len(requests)))
        num_new = TRIED_ROWS if self._time_to_look > 0 else 0
        worth_it = []
        for index, request in enumerate(requests):
            row = self._rows.get(request)
            if row is None:
                num_new -= 1
                if num_new < 0:
                    continue
            elif row.num_failures >= PATIENCE and len(request.token_ids) < row.due:
                continue
            worth_it.append(index)
        return worth_it

    def _ask(self, requests: Sequence[Request]) -> list[DraftPath] | None:
        """What the proposer says of each; None where it failed, or there are none."""
        if not requests:
            return None
        most_in_flight = max(request.num_in_flight_tokens for request in requests)
        try:
            proposals = self._proposer.propose(requests, most_in_flight + self._num_drafts)
        except ProposerError as error:
            self._failed = True
            logger.error("%s; the engine goes on without it: mend it, and start anew", error)
            return None
        paths = []
        for request, token_ids in zip(requests, proposals, strict=True):
            ahead = request.num_in_flight_tokens
            path = tuple(token_ids)[: ahead + self._num_drafts]
            paths.append(DraftPath(len(request.token_ids), ahead, path))
            row = self._row(request)
            num_new = len(request.token_ids) - row.num_read
            self._time_to_look -= LOOK_SECONDS + TOKEN_SECONDS * num_new
            row.num_read += num_new
        return paths

    def _lengths(self, rows: Sequence[_Row], room: Sequence[int]) -> list[int]:
        """How many of each request's drafts to verify. One costs its share of what a step takes
        longer if all have one, and brings a token with the likelihood of its acceptance."""
        cost = self._controller.relative_cost(len(rows))
        expected = [0.0] * self._num_drafts
        lengths = []
        for row, most in zip(rows, room, strict=True):
            length = 0
            for likelihood in row.survival[:most]:
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

    def _begin(self, request: Request, row: _Row, path: DraftPath) -> None:
        """Tries a path; if it has no drafts, that is all there is to know about it."""
        if path.drafts:
            row.trial = path
            self._trials.append((request, row))
        else:
            self._learn(row, path.start, 0, 0, 0)

    def _settle(self, row: _Row, path: DraftPath, token_ids: list[int]) -> None:
        """Compares a path's drafts with what came, as far as it is known: all of them, as if no
        fewer had been verified."""
        num_drafts, num_came = len(path.drafts), len(token_ids) - path.first_place
        num_judged = min(num_drafts, max(1, num_came))
        self._learn(row, path.start, num_drafts, num_judged, path.num_right(token_ids))

    def _learn(
        self, row: _Row, start: int, num_drafts: int, num_judged: int, num_right: int
    ) -> None:
        """Records what came of drafts, and when the next trial is due, behind ``start`` tokens.

        Where no trial is made for a while, as many failed, the last one stands for all those that
        would have failed.
        """
        row.num_failures = 0 if num_right else row.num_failures + 1
        gap = 1 + num_right + min(row.num_failures // PATIENCE, MAX_PAUSE)
        row.due = start + gap
        weight = 1.0 if self._on or num_right else float(gap)
        row.record.add(num_drafts, num_judged, num_right, weight)
        row.survival, row.expected = row.record.survival(), row.record.expected()
        self._latest = row.record


class _Forecast:
    """What drafts would bring the next step, by those requests of which the proposer was asked:
    no others have any."""

    def __init__(self, num_positions: int) -> None:
        self._expected = [0.0] * num_positions
        self._offered = 0.0
        """Of a request: what ``_Row.expected`` and ``DraftRecord.offered`` are on average."""
        self.is_new = False
        """It was not asked for since it changed."""

    def take_in(self, requests: Sequence[Request], known: WeakKeyDictionary[Request, _Row]) -> None:
        """These are the step's requests."""
        rows = [row for row in map(known.get, requests) if row is not None]
        if rows:
            count = len(requests)
            columns = zip(*(row.expected for row in rows), strict=True)
            self._expected = [sum(column) / count for column in columns]
            self._offered = sum(row.record.offered for row in rows) / count
            self.is_new = True

    def of_step(self, num_rows: int) -> tuple[list[float], float]:
        """Of each position, how many drafts of so many requests would be accepted there; and how
        likely any request has one."""
        self.is_new = False
        return [num_rows * share for share in self._expected], 1 - (1 - self._offered) ** num_rows
