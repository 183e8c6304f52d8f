"""Continuous batching: every step is a fresh list of (request, how many new tokens).

The idea of iteration-level scheduling is Orca's (OSDI 2022), chunked prefill is Sarathi-Serve's
(arXiv 2403.02310), preemption by recomputation is PagedAttention's (arXiv 2309.06180).
"""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mini_infer.cache.manager import KVCacheManager, PrefixMatch
from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import PolicyError, PromptTooLongError
from mini_infer.core.events import (
    ChunkScheduled,
    EventStream,
    Resumed,
    StepCompleted,
    TokensEmitted,
)
from mini_infer.core.outputs import FinishReason, RequestUpdate, StepOutput
from mini_infer.core.request import Request, RequestState
from mini_infer.runtime import request_events as tell
from mini_infer.runtime.places import Places
from mini_infer.runtime.policy import SchedulingPolicy, load_policy
from mini_infer.runtime.request_queues import RequestQueues
from mini_infer.runtime.speculation.chunk_drafts import NO_DRAFTS
from mini_infer.runtime.step_plan import StepPlan, emit_chunks
from mini_infer.runtime.step_results import apply_chunk_result, end_update
from mini_infer.runtime.turns import turns_of

if TYPE_CHECKING:
    from mini_infer.core.step_costs import StepCosts
    from mini_infer.runtime.speculation.speculation import Speculation


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
        costs: "StepCosts | None" = None,
    ) -> None:
        """``costs`` are those of the executor's steps: they tell how many drafts pay."""
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
        self._speculation = _speculation(config, events, costs)
        self._places = Places(config.max_num_seqs, self._queues, self.cache, self.policy, events)
        self._turns = turns_of(config)
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
        if self._speculation is not None and not self._requests:
            self._speculation.wake()
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
        if not plan.chunks and self.config.feeds_tokens_back:  # better a short gap than a long one
            self._schedule_decoding(plan, with_gap=True)
        return self._planned(plan)

    def schedule_only(self, requests: Sequence[Request]) -> ScheduledBatch | None:
        """A step of these requests, wherever they are, and of no other; or None, as ``schedule``
        says. For ``StepTrials``."""
        plan = StepPlan(budget=self.config.max_num_batched_tokens)
        for request in requests:
            if request.state in (RequestState.PREFILLING, RequestState.DECODING):
                self._schedule_running(plan, request, request.state)
            elif plan.budget > 0 and self._places.free_slots:
                prefix = self.cache.match_prefix(request)
                if not prefix.is_worth_waiting_for(request.num_tokens):
                    self._admit(plan, request, prefix)
        return self._planned(plan)

    def _planned(self, plan: StepPlan) -> ScheduledBatch | None:
        if not plan.chunks:
            return None
        batch = plan.to_batch(self._num_steps, self._turns is not None)
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
            num_known = len(request.token_ids)
            update = apply_chunk_result(request, chunk, out, index, now, events)
            start = chunk.num_computed_tokens if chunk.start_known else num_known - 1
            end = start + chunk.num_new_tokens
            if self._speculation is not None and chunk.samples:
                end = len(request.token_ids) - 1  # beyond it are drafts that were not accepted
                if chunk.num_drafts:
                    num_tokens = len(out.token_ids[index])
                    self._speculation.take_in(request, chunk, num_tokens, len(requests))
            if end // block_size != start // block_size:  # one is full
                self.cache.commit(request, end)
            if update is not None:
                updates.append(update)
                if update.finish_reason is not None:
                    self._finish(request, update.finish_reason, update.stop_reason)
        if self._speculation is not None:
            self._speculation.end_step(batch.chunks, requests, now)
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
                request.num_in_flight_drafts = 0
                self._places.preempt(request)
        return steps[0]

    # -- how a step is put together

    def _schedule_decoding(self, plan: StepPlan, with_gap: bool = False) -> None:
        """In most steps each request here gets one more token, in a block that it has: that case
        is written out, as it is what a step of hundreds of requests costs."""
        decoding = RequestState.DECODING
        requests = self._queues.running(decoding)
        if self._turns is not None:
            requests = self._turns.next(requests, self._in_flight, with_gap)
        drafting = self._speculation is not None and self._speculation.plan_step(
            requests,
            self._queues.count(RequestState.PREFILLING),
            bool(self._places.free_slots) and self._queues.next_outside() is not None,
        )
        for request in requests:
            start = request.num_computed_tokens
            if (
                not drafting
                and not request.num_drafts
                and not request.num_in_flight_drafts
                and start < request.kv_capacity
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
        if drafting and self._speculation is not None:
            self._speculation.drop_proposals()

    def _schedule_running(self, plan: StepPlan, request: Request, state: RequestState) -> None:
        if request.state is not state or request.request_id in plan.held_back:
            return  # it gave its place to one before it
        num_new_tokens = self._chunk_size(plan, request)
        if num_new_tokens == 0:
            return
        try:
            new_blocks = self._places.allocate_or_preempt(plan, request, num_new_tokens)
        except PolicyError as error:
            self._fail(request, error)
            return
        if new_blocks is not None:
            self._append(plan, request, num_new_tokens, new_blocks)

    def _append(
        self, plan: StepPlan, request: Request, num_new_tokens: int, new_blocks: list[int]
    ) -> None:
        """Adds a chunk, with the drafts for which there is room: they take it from nobody."""
        drafts = wanted = NO_DRAFTS
        if self._speculation is not None:
            wanted = self._speculation.drafts_of(request, num_new_tokens)
        if wanted is not NO_DRAFTS:
            # Proposals are written behind the drafts before the next step is scheduled.
            for drafts in (wanted, wanted._replace(num_proposed=0), NO_DRAFTS):
                ahead = drafts.num_drafts + drafts.num_proposed
                more = self.cache.allocate(request, num_new_tokens + ahead)
                if more is not None:
                    new_blocks = new_blocks + more
                    break
        if plan.append(request, num_new_tokens, new_blocks, drafts):
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
        standing = (chunk.num_new_tokens - chunk.num_drafts for chunk in plan.chunks)
        prefill_tokens = sum(count for count in standing if count > 1)
        return remaining if remaining <= self.config.max_num_batched_tokens - prefill_tokens else 0

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
                if not self._places.displace_for(plan, request):
                    return
            except PolicyError as error:
                self._fail(request, error)

    def _admit_from_outside(self, plan: StepPlan) -> None:
        """Admits by rank. A request whose prompt begins as one that is being computed (choices of
        one prompt do) waits to share it; others may pass, but not take its slot."""
        while plan.budget > 0 and len(self._places.free_slots) > self._queues.num_set_aside:
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

    def _admit(self, plan: StepPlan, request: Request, prefix: PrefixMatch) -> bool:
        """Gives it a slot and its first chunk, where blocks and budget are there for it."""
        if self._places.blocks_lacking(request, prefix) > 0:
            return False
        request.num_computed_tokens = prefix.num_tokens
        num_new_tokens = self._chunk_size(plan, request)
        if num_new_tokens == 0:
            request.num_computed_tokens = 0
            return False
        new_blocks = self.cache.allocate(request, num_new_tokens, prefix)
        assert new_blocks is not None, "blocks_lacking found enough"
        request.slot = self._places.free_slots.pop()
        self._queues.move(request, RequestState.PREFILLING)
        now = self.events.now()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = prefix.num_tokens
            self.events.emit(tell.admitted_event(request, self.cache.looks_up(request), now))
        else:
            self.events.emit(Resumed(now, request.request_id, prefix.num_tokens))
        plan.admit(request, prefix)
        self._append(plan, request, num_new_tokens, new_blocks)
        return True

    # -- ends

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        self._places.give_up(request)
        del self._requests[request.request_id]
        self._queues.move(request, RequestState.FINISHED)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self.events.emit(tell.finished_event(request, self.events.now()))

    def _fail(self, request: Request, error: PolicyError) -> None:
        self._finish(request, "error", str(error))
        self._failures.append(end_update(request, "error", str(error)))


def _speculation(
    config: EngineConfig, events: EventStream, costs: "StepCosts | None"
) -> "Speculation | None":
    """Imported by engines that speculate only: the others start without."""
    if config.speculative_config is None:
        return None
    from mini_infer.runtime.speculation.speculation import Speculation

    return Speculation(config, events, costs)
