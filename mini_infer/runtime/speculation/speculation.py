"""What the scheduler asks and tells about drafts, whoever proposes them."""

from collections.abc import Sequence
from operator import attrgetter

from mini_infer.core.batch import Chunk
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.events import DraftsVerified, EventStream
from mini_infer.core.request import Request
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.speculation.chunk_drafts import NO_DRAFTS, ChunkDrafts
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.host_drafts import HostDrafts
from mini_infer.runtime.speculation.load import load_proposer

NUM_NEW_TOKENS, NUM_DRAFTS, NUM_PROPOSED, START_KNOWN = (
    attrgetter(name) for name in ("num_new_tokens", "num_drafts", "num_proposed", "start_known")
)
"""Each is mapped over all chunks of every step."""


class Speculation:
    """Belongs to a scheduler.

    A host's proposer goes on from known tokens, over those in flight, and the step that is planned
    verifies its drafts. A device's leaves drafts behind one step, which the next one verifies; how
    many it shall leave is decided here, a step ahead.
    """

    def __init__(
        self, config: EngineConfig, events: EventStream, costs: StepCosts | None = None
    ) -> None:
        assert config.speculative_config is not None
        self._config = config.speculative_config
        self._max_step_tokens = config.max_num_batched_tokens
        self._is_pipelined = config.is_pipelined
        self._events = events
        self._controller = DraftController(self._config, costs)
        self._host: HostDrafts | None = None
        if not self._config.on_device:
            proposer = load_proposer(self._config, config.model_config.vocab_size)
            self._host = HostDrafts(self._config, proposer, self._controller)
        self._last_end: float | None = None
        """When the last step was over; None where the engine was idle since."""
        self._num_proposed = 0
        self._share = 0
        """Drafts that each decoding request may have verified in a step."""
        self._proposals: dict[str, tuple[int, ...]] = {}
        self._asked = False
        """Was a host asked for drafts since the last step was over?"""
        self._told: dict[int, tuple[float, float]] = {}
        """Of the step that is taken in, by the number of drafts: ``_seconds``."""

    def plan_step(
        self, decoding: Sequence[Request], num_prefilling: int, others_wait: bool
    ) -> bool:
        """Decides on the drafts of a step of these requests, and of others that may enter if
        ``others_wait``. Can it have any?"""
        num_rows = len(decoding) + num_prefilling
        self._share = self._drafts_each(len(decoding), num_prefilling > 0 or others_wait)
        if self._host is None:
            self._num_proposed = self._controller.num_drafts(num_rows, self._share)
            return self._num_proposed > 0
        self._proposals.clear()
        if decoding:
            self._controller.pass_step(len(decoding))
            if self._host.drafting(len(decoding)):
                self._asked = True
                room = [min(self._room(request), self._share) for request in decoding]
                proposals = self._host.propose(decoding, room)
                for request, token_ids in zip(decoding, proposals, strict=True):
                    if token_ids:
                        self._proposals[request.request_id] = token_ids
        return bool(self._proposals)

    def drafts_of(self, request: Request, num_new_tokens: int) -> ChunkDrafts:
        """For a chunk of so many tokens that stand, drafts not counted."""
        if request.num_computed_tokens + num_new_tokens < request.num_tokens:
            return NO_DRAFTS  # it does not sample
        room = self._room(request)
        if self._host is not None:
            token_ids = self._proposals.pop(request.request_id, ())  # they are for one step
            return ChunkDrafts(len(token_ids), token_ids) if token_ids else NO_DRAFTS
        num_drafts = max(0, min(request.num_drafts, room, self._share))
        # What is sampled here is one token more, and so may be what is proposed behind that.
        most = min(self._num_proposed, room - num_drafts - 1, self._share)
        if not num_drafts and most <= 0:
            return NO_DRAFTS
        return ChunkDrafts(num_drafts, (), max(0, most))

    def drop_proposals(self) -> None:
        """The decoding requests of a step are planned. Who got no place among them has no drafts in
        another one, which may be full without."""
        self._proposals.clear()

    def _room(self, request: Request) -> int:
        """Drafts that could still be tokens of its answer: the last one is sampled for sure."""
        return request.max_num_tokens - request.num_tokens - 1

    def _drafts_each(self, num_decoding: int, is_shared: bool) -> int:
        """Drafts of each decoding request for which a step has tokens. Where it ``is_shared`` with
        prompts, half of what plain decoding would leave is theirs: they would wait for ever beside
        requests that fill every step with drafts."""
        if num_decoding > MAX_SPECULATING_ROWS:
            return 0  # some may be left of a smaller step
        free = max(0, self._max_step_tokens - num_decoding)
        return (free // 2 if is_shared else free) // max(1, num_decoding)

    def wake(self) -> None:
        """The engine was idle until now: that time was no step's."""
        self._last_end = None

    def take_in(self, request: Request, chunk: Chunk, num_tokens: int, num_rows: int) -> None:
        """A step of ``num_rows`` requests verified drafts of this one, and gave it ``num_tokens``,
        of which all but one were drafts."""
        num_accepted = num_tokens - 1
        if self._host is not None:
            place = chunk.num_computed_tokens + chunk.num_new_tokens - chunk.num_drafts
            self._host.verified(request, place, num_accepted)
        else:
            self._controller.record(chunk.num_drafts, num_accepted)
        if self._events.wants(DraftsVerified):
            seconds, plain_seconds = self._seconds(num_rows, chunk.num_drafts)
            self._events.emit(
                DraftsVerified(
                    self._events.now(),
                    request.request_id,
                    chunk.num_drafts,
                    num_accepted,
                    seconds,
                    num_tokens * plain_seconds,
                )
            )

    def end_step(self, chunks: Sequence[Chunk], requests: Sequence[Request], now: float) -> None:
        """A step of these chunks is over by ``now``; its tokens were taken in. From one end to the
        next is what a step really takes, whether the device was busy all the time or waited for the
        host."""
        last_end, self._last_end = self._last_end, now
        asked, self._asked = self._asked, False
        self._told.clear()
        num_rows = len(chunks)
        num_drafts = num_proposed = 0
        is_plain = sum(map(NUM_NEW_TOKENS, chunks)) == num_rows
        is_pure = True
        if not is_plain:
            num_drafts = max(map(NUM_DRAFTS, chunks))
            is_pure = all(c.samples and c.num_new_tokens == 1 + c.num_drafts for c in chunks)
        if self._host is None:
            num_proposed = max(map(NUM_PROPOSED, chunks))
        if not num_drafts and not num_proposed and not all(map(START_KNOWN, chunks)):
            is_pure = False  # neither plain nor with drafts: it runs as the latter do
        seconds = None if last_end is None else now - last_end
        if not is_pure or self._is_pipelined:  # prompts, or other steps, take some
            seconds = None
        if asked and not num_drafts:
            self._controller.pay(num_rows, seconds)
        elif seconds is not None or num_drafts or num_proposed:
            self._controller.end_step(num_rows, num_drafts, seconds, num_proposed)
        if self._host is not None and is_pure:
            self._host.watch(requests)

    def _seconds(self, num_rows: int, num_drafts: int) -> tuple[float, float]:
        """Of the step that is taken in, with so many drafts of each request, and of a plain one."""
        told = self._told.get(num_drafts)
        if told is None:
            seconds = self._controller.seconds(num_rows, num_drafts)
            told = seconds, self._controller.plain_seconds(num_rows)
            self._told[num_drafts] = told
        return told
