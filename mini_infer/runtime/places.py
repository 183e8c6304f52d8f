"""Who holds a place (a slot and KV blocks), and who has to give it up for whom."""

from collections.abc import Sequence

from mini_infer.cache.manager import KVCacheManager, PrefixMatch
from mini_infer.core.events import EventStream, Preempted
from mini_infer.core.request import Request, RequestState
from mini_infer.runtime.policy import SchedulingPolicy
from mini_infer.runtime.request_queues import RequestQueues
from mini_infer.runtime.step_plan import StepPlan


class Places:
    """The slots of the device state and the KV pool, as the scheduler hands them out.

    Preemption is by recomputation (arXiv 2309.06180): who gives up its place computes anew.
    """

    def __init__(
        self,
        num_slots: int,
        queues: RequestQueues,
        cache: KVCacheManager,
        policy: SchedulingPolicy,
        events: EventStream,
    ) -> None:
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._queues = queues
        self._cache = cache
        self._policy = policy
        self._events = events

    def blocks_lacking(self, request: Request, prefix: PrefixMatch) -> int:
        """Blocks missing for the whole prompt beside those promised to other prompts."""
        remaining = request.num_tokens - prefix.num_tokens
        needed = self._cache.blocks_needed(request, remaining, prefix)
        promised = sum(
            self._cache.blocks_needed(other, other.num_tokens - other.num_computed_tokens)
            for other in self._queues.running(RequestState.PREFILLING)
        )
        return needed + promised - self._cache.num_available_blocks

    def allocate_or_preempt(
        self, plan: StepPlan, request: Request, num_new_tokens: int
    ) -> list[int] | None:
        """Blocks for a running request's chunk, at the cost of those that rank after it; None where
        it has to wait.

        Raises:
            PolicyError: the policy failed to choose among those.
        """
        while (blocks := self._cache.allocate(request, num_new_tokens)) is None:
            candidates = [c for c in self._unplanned(plan) if c.rank > request.rank]
            if not self._take_place(plan, candidates):
                return None
        return blocks

    def displace_for(self, plan: StepPlan, request: Request) -> bool:
        """Preempts one running request for ``request``; False where none need or may go.

        Raises:
            PolicyError: the policy failed to say.
        """
        candidates = [
            other
            for other in self._unplanned(plan)
            if other.rank > request.rank and self._policy.may_displace(request, other)
        ]
        if not candidates:
            return False
        prefix = self._cache.match_prefix(request)
        if prefix.is_worth_waiting_for(request.num_tokens):
            return False
        lacking = self.blocks_lacking(request, prefix)
        if lacking <= 0 and self.free_slots:
            return False
        reclaimable = sum(len(self._cache.block_table(c)) for c in candidates)
        # Where more is lacking, it could not enter even then.
        return lacking <= reclaimable and self._take_place(plan, candidates)

    def preempt(self, request: Request) -> None:
        """Sends an idle request out of its place, to compute all its tokens anew."""
        self._events.emit(
            Preempted(self._events.now(), request.request_id, request.num_computed_tokens)
        )
        request.num_computed_tokens = 0
        request.num_drafts = 0
        request.draft_token_ids = ()
        request.num_preemptions += 1
        self.give_up(request)
        self._queues.move(request, RequestState.PREEMPTED)

    def give_up(self, request: Request) -> None:
        """Takes back the request's blocks and slot, where it has them."""
        self._cache.release(request)
        if request.slot >= 0:
            self.free_slots.append(request.slot)
            request.slot = -1

    def _take_place(self, plan: StepPlan, candidates: Sequence[Request]) -> bool:
        """Preempts an idle candidate; where all are in flight, sees to it that one soon isn't."""
        idle = [request for request in candidates if request.num_in_flight_steps == 0]
        if idle:
            self.preempt(self._policy.choose_victim(idle))
        elif candidates:
            plan.held_back.add(self._policy.choose_victim(candidates).request_id)
        return bool(idle)

    def _unplanned(self, plan: StepPlan) -> list[Request]:
        """Running requests that the planned step does not touch."""
        taken = plan.held_back | {request.request_id for request in plan.requests}
        return [
            request
            for state in (RequestState.PREFILLING, RequestState.DECODING)
            for request in self._queues.running(state)
            if request.request_id not in taken
        ]
