"""Continuous batching: every step is a fresh list of (request, how many new tokens).

The idea of iteration-level scheduling is Orca's (OSDI 2022), chunked prefill is Sarathi-Serve's
(arXiv 2403.02310), preemption by recomputation is PagedAttention's (arXiv 2309.06180).
"""

import itertools
from collections import deque
from collections.abc import Sequence

from mini_infer.cache.manager import KVCacheManager, PrefixMatch
from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import PolicyError, PromptTooLongError
from mini_infer.core.events import (
    ChunkScheduled,
    EventStream,
    Preempted,
    Resumed,
    StepCompleted,
    TokensEmitted,
)
from mini_infer.core.outputs import FinishReason, RequestUpdate, StepOutput
from mini_infer.core.request import Request, RequestState
from mini_infer.runtime import request_events as tell
from mini_infer.runtime.policy import SchedulingPolicy, load_policy
from mini_infer.runtime.request_queues import RequestQueues
from mini_infer.runtime.step_plan import StepPlan, emit_chunks
from mini_infer.runtime.step_results import apply_chunk_result, end_update


class Scheduler:
    """One token budget a step: decoding requests first, then prompts, then who waits outside.

    Every request that was admitted can finish alone in the pool (``add`` refuses others), and the
    first in the policy's order can take blocks from all others, so a step always makes progress.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        events: EventStream,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.config = config
        self.events = events
        self.policy = policy or load_policy(config.scheduling_policy)
        self.cache = KVCacheManager(
            num_blocks,
            config.block_size,
            events,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._queues = RequestQueues()
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        self._failures: list[RequestUpdate] = []
        self._num_arrivals = 0
        self._num_steps = 0

    # -- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            PromptTooLongError: it could not finish even alone in the KV pool.
            PolicyError: the scheduling policy gave it no key.
        """
        assert request.request_id not in self._requests, "the engine keeps ids apart"
        # The last sampled token is never an input, so it needs no KV.
        blocks = self.cache.blocks_for(request.num_prompt_tokens + request.max_tokens - 1)
        if blocks > self.cache.num_blocks:
            raise PromptTooLongError(
                f"prompt of {request.num_prompt_tokens} tokens + {request.max_tokens} new ones "
                f"need {blocks} KV blocks, the pool has {self.cache.num_blocks}: shorten either "
                f"or raise kv_cache_memory",
                "prompt",
            )
        request.arrival = self._num_arrivals
        request.rank = (self.policy.key(request), request.arrival)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._queues.add(request)
        self.events.emit(tell.queued_event(request, self.events.now()))

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment; an unknown or finished id is no error."""
        self.finish(request_id, "abort")

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Ends a request from outside: a stop string in its text, an abort, a failed step.

        Steps in flight may still write to its blocks; steps run in order, so whoever gets the
        blocks next overwrites that.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # -- one step

    def schedule(self) -> ScheduledBatch | None:
        """Plans the next step, or returns None when nothing can run before ``update``.

        May be called before the previous step's result is known: tokens in flight count as there.
        """
        if not self._requests:
            return None
        plan = StepPlan(budget=self.config.max_num_batched_tokens)
        self._displace(plan)
        self._schedule_decoding(plan)
        prefilling = self._queues.running(RequestState.PREFILLING)
        if prefilling and self.config.enable_chunked_prefill:
            with plan.all_but_a_quarter():
                self._schedule_short(plan, prefilling)
        for request in prefilling:
            self._schedule_running(plan, request, RequestState.PREFILLING)
        self._admit_from_outside(plan)
        return self._planned(plan)

    def schedule_only(self, requests: Sequence[Request]) -> ScheduledBatch | None:
        """A step of these requests, wherever they are, and of no other; or None, as ``schedule``
        says. For ``StepTrials``."""
        plan = StepPlan(budget=self.config.max_num_batched_tokens)
        for request in requests:
            if request.state in (RequestState.PREFILLING, RequestState.DECODING):
                self._schedule_running(plan, request, request.state)
            elif plan.budget > 0 and self._free_slots:
                prefix = self.cache.match_prefix(request)
                if not prefix.is_worth_waiting_for(request.num_tokens):
                    self._admit(plan, request, prefix)
        return self._planned(plan)

    def _planned(self, plan: StepPlan) -> ScheduledBatch | None:
        if not plan.chunks:
            return None
        batch = plan.to_batch(self._num_steps)
        self._num_steps += 1
        self._in_flight.append((batch.step_id, plan.requests))
        if self.events.wants(ChunkScheduled):
            emit_chunks(batch, self.events)
        return batch

    def update(self, batch: ScheduledBatch, out: StepOutput) -> list[RequestUpdate]:
        """Takes in the result of the oldest step in flight.

        A request that is ``told_at_end`` is in the updates only when it ends.
        """
        now = self.events.now()
        block_size = self.config.block_size
        finished = RequestState.FINISHED
        events = self.events if self.events.wants(TokensEmitted) else None
        updates: list[RequestUpdate] = []
        step_id, requests = self._in_flight.popleft()
        assert step_id == batch.step_id, "steps are updated in the order they were scheduled"
        for index, (request, chunk) in enumerate(zip(requests, batch.chunks, strict=True)):
            request.num_in_flight_steps -= 1
            if request.state is finished:
                continue
            update = apply_chunk_result(request, chunk, out, index, now, events)
            end = chunk.num_computed_tokens + chunk.num_new_tokens
            if end // block_size != chunk.num_computed_tokens // block_size:  # one is full
                self.cache.commit(request, end)
            if update is not None:
                updates.append(update)
                if update.finish_reason is not None:
                    self._finish(request, update.finish_reason, update.stop_reason)
        if self.events.wants(StepCompleted):
            self.events.emit(tell.step_event(batch, self._queues, self.cache, self.events.now()))
        return updates

    def take_failures(self) -> list[RequestUpdate]:
        """Requests that ended while ``schedule`` ran, since the last call: their policy failed."""
        failures, self._failures = self._failures, []
        return failures

    def retract(self) -> list[Request]:
        """Takes back all steps in flight, as the oldest raised: their requests lose their places,
        and what these steps would have brought is computed anew. Returns who was in the oldest,
        and has not ended."""
        steps = [[r for r in requests if not r.finished] for _, requests in self._in_flight]
        self._in_flight.clear()
        for request in itertools.chain(*steps):
            if request.num_in_flight_steps:
                request.num_in_flight_steps = request.num_in_flight_tokens = 0
                self._preempt(request)
        return steps[0]

    # -- how a step is put together

    def _schedule_decoding(self, plan: StepPlan) -> None:
        """In most steps each request here gets one more token, in a block that it has: that case
        is written out, as it is what a step of hundreds of requests costs."""
        decoding = RequestState.DECODING
        for request in self._queues.running(decoding):
            start = request.num_computed_tokens
            if (
                start < request.kv_capacity
                and start + 1 == request.num_tokens < request.max_num_tokens
                and plan.budget > 0
                and not plan.held_back
                and request.state is decoding
            ):
                plan.chunks.append(Chunk(request.request_id, request.slot, start, 1))
                plan.requests.append(request)
                plan.budget -= 1
                request.num_computed_tokens = start + 1
                request.num_in_flight_steps += 1
                request.num_in_flight_tokens += 1
            else:
                self._schedule_running(plan, request, decoding)

    def _schedule_running(self, plan: StepPlan, request: Request, state: RequestState) -> None:
        if request.state is not state or request.request_id in plan.held_back:
            return  # it gave its place to one before it
        num_new_tokens = self._chunk_size(plan, request)
        if num_new_tokens == 0:
            return
        try:
            new_blocks = self._allocate_or_preempt(plan, request, num_new_tokens)
        except PolicyError as error:
            self._fail(request, error)
            return
        if new_blocks is not None and plan.append(request, num_new_tokens, new_blocks):
            self._queues.move(request, RequestState.DECODING)

    def _schedule_short(self, plan: StepPlan, prefilling: list[Request]) -> None:
        """Prompts that this can complete, then newcomers: short ones do not wait for long ones."""
        for request in prefilling:
            if request.num_tokens - request.num_computed_tokens <= plan.budget:
                self._schedule_running(plan, request, RequestState.PREFILLING)
        self._admit_from_outside(plan)

    def _chunk_size(self, plan: StepPlan, request: Request) -> int:
        """Tokens of ``request`` that this step may compute; 0 when it has to wait."""
        num_tokens = request.num_tokens
        if num_tokens >= request.max_num_tokens:
            return 0  # its last token is in flight
        remaining = num_tokens - request.num_computed_tokens
        if self.config.enable_chunked_prefill or remaining == 1:
            return min(remaining, plan.budget)
        # A whole prompt has the budget to itself: decodes beside it must not keep it out for ever.
        prefill_tokens = sum(c.num_new_tokens for c in plan.chunks if c.num_new_tokens > 1)
        return remaining if remaining <= self.config.max_num_batched_tokens - prefill_tokens else 0

    def _allocate_or_preempt(
        self, plan: StepPlan, request: Request, num_new_tokens: int
    ) -> list[int] | None:
        while (blocks := self.cache.allocate(request, num_new_tokens)) is None:
            candidates = [c for c in self._unplanned(plan) if c.rank > request.rank]
            if not self._take_place(plan, candidates):
                return None
        return blocks

    def _displace(self, plan: StepPlan) -> None:
        """Lets the first who waits take the place of running requests, where the policy says so.

        They must rank after it, or each of two could displace the other for ever. First come,
        first served, nobody does, and a look at the last of them is all that this costs.
        """
        while (request := self._queues.next_outside()) is not None:
            last = self._queues.last_running()
            if last is None or last.rank < request.rank:
                return
            try:
                if not self._displace_for(plan, request):
                    return
            except PolicyError as error:
                self._fail(request, error)

    def _displace_for(self, plan: StepPlan, request: Request) -> bool:
        """Preempts one running request for ``request``; False where none need or may go."""
        candidates = [
            other
            for other in self._unplanned(plan)
            if other.rank > request.rank and self.policy.may_displace(request, other)
        ]
        if not candidates:
            return False
        prefix = self.cache.match_prefix(request)
        if prefix.is_worth_waiting_for(request.num_tokens):
            return False
        lacking = self._blocks_lacking(request, prefix)
        if lacking <= 0 and self._free_slots:
            return False
        reclaimable = sum(len(self.cache.block_table(c)) for c in candidates)
        # Where more is lacking, it could not enter even then.
        return lacking <= reclaimable and self._take_place(plan, candidates)

    def _take_place(self, plan: StepPlan, candidates: list[Request]) -> bool:
        """Preempts an idle candidate; where all are in flight, sees to it that one soon isn't."""
        idle = [request for request in candidates if request.num_in_flight_steps == 0]
        if idle:
            self._preempt(self.policy.choose_victim(idle))
        elif candidates:
            plan.held_back.add(self.policy.choose_victim(candidates).request_id)
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

    def _preempt(self, request: Request) -> None:
        self.events.emit(
            Preempted(self.events.now(), request.request_id, request.num_computed_tokens)
        )
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._give_up_place(request)
        self._queues.move(request, RequestState.PREEMPTED)

    def _admit_from_outside(self, plan: StepPlan) -> None:
        """Admits by rank. A request whose prompt begins as one that is being computed (choices of
        one prompt do) waits to share it; others may pass, but not take its slot."""
        while plan.budget > 0 and len(self._free_slots) > self._queues.num_set_aside:
            request = self._queues.next_outside()
            if request is None:
                break
            prefix = self.cache.match_prefix(request)
            if prefix.is_worth_waiting_for(request.num_tokens):
                self._queues.set_aside(request)
                continue
            if not self._admit(plan, request, prefix):
                break
        self._queues.bring_back()

    def _blocks_lacking(self, request: Request, prefix: PrefixMatch) -> int:
        """Blocks missing for the whole prompt beside those promised to other prompts."""
        remaining = request.num_tokens - prefix.num_tokens
        needed = self.cache.blocks_needed(request, remaining, prefix)
        promised = sum(
            self.cache.blocks_needed(other, other.num_tokens - other.num_computed_tokens)
            for other in self._queues.running(RequestState.PREFILLING)
        )
        return needed + promised - self.cache.num_available_blocks

    def _admit(self, plan: StepPlan, request: Request, prefix: PrefixMatch) -> bool:
        """Gives it a slot and its first chunk, where blocks and budget are there for it."""
        if self._blocks_lacking(request, prefix) > 0:
            return False
        request.num_computed_tokens = prefix.num_tokens
        num_new_tokens = self._chunk_size(plan, request)
        if num_new_tokens == 0:
            request.num_computed_tokens = 0
            return False
        new_blocks = self.cache.allocate(request, num_new_tokens, prefix)
        assert new_blocks is not None, "_blocks_lacking found enough"
        request.slot = self._free_slots.pop()
        self._queues.move(request, RequestState.PREFILLING)
        now = self.events.now()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = prefix.num_tokens
            self.events.emit(tell.admitted_event(request, self.cache.looks_up(request), now))
        else:
            self.events.emit(Resumed(now, request.request_id, prefix.num_tokens))
        plan.admit(request, prefix)
        if plan.append(request, num_new_tokens, new_blocks):
            self._queues.move(request, RequestState.DECODING)
        return True

    # -- ends

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        self._give_up_place(request)
        del self._requests[request.request_id]
        self._queues.move(request, RequestState.FINISHED)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self.events.emit(tell.finished_event(request, self.events.now()))

    def _fail(self, request: Request, error: PolicyError) -> None:
        self._finish(request, "error", str(error))
        self._failures.append(end_update(request, "error", str(error)))

    def _give_up_place(self, request: Request) -> None:
        self.cache.release(request)
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1
