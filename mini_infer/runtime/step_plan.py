"""A step while the scheduler puts it together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mini_infer.cache.manager import PrefixMatch
from mini_infer.core.batch import IN_FLIGHT, Admission, Chunk, ScheduledBatch
from mini_infer.core.events import ChunkScheduled, EventStream
from mini_infer.core.request import Request
from mini_infer.runtime.speculation.chunk_drafts import NO_DRAFTS, ChunkDrafts


@dataclass(slots=True)
class StepPlan:
    """What is in the step so far, and how many tokens may still join it."""

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """Those of ``chunks``, in the same order."""
    admissions: list[Admission] = field(default_factory=list)
    held_back: set[str] = field(default_factory=set)
    """In flight, so not to be preempted now; left out of this step, to be preempted next time."""

    def admit(self, request: Request, prefix: PrefixMatch) -> None:
        """Tells the device of a request that has got a slot."""
        self.admissions.append(
            Admission(
                request_id=request.request_id,
                slot=request.slot,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                seed=request.seed,
                stop_token_ids=tuple(sorted(request.eos_token_ids | request.stop_token_ids)),
                bad_words_token_ids=request.bad_words_token_ids,
                block_ids=prefix.block_ids,
            )
        )

    def append(
        self,
        request: Request,
        num_new_tokens: int,
        new_block_ids: list[int],
        drafts: ChunkDrafts = NO_DRAFTS,
    ) -> bool:
        """Adds a chunk of so many tokens and its drafts, and moves its request on, as if these were
        accepted; does the chunk sample?"""
        start = request.num_computed_tokens
        samples = start + num_new_tokens == request.num_tokens
        num_drafts = drafts.num_drafts
        num_new_tokens += num_drafts
        self.chunks.append(
            Chunk(
                request_id=request.request_id,
                slot=request.slot,
                num_computed_tokens=start,
                num_new_tokens=num_new_tokens,
                new_block_ids=tuple(new_block_ids),
                samples=samples,
                num_drafts=num_drafts,
                draft_token_ids=drafts.token_ids,
                start_known=request.num_in_flight_drafts == 0,
                num_proposed=drafts.num_proposed,
            )
        )
        self.requests.append(request)
        self.budget = max(0, self.budget - num_new_tokens)
        request.num_computed_tokens = start + num_new_tokens
        request.num_in_flight_steps += 1
        request.num_in_flight_tokens += samples + num_drafts
        request.num_in_flight_drafts += num_drafts
        request.num_drafts = drafts.num_proposed
        return samples

    @contextmanager
    def all_but_a_quarter(self) -> Iterator[None]:
        """Within, a quarter of what is left of the budget can't be spent."""
        kept = -(-self.budget // 4)
        self.budget -= kept
        yield
        self.budget += kept

    def to_batch(self, step_id: int, pipelined: bool = False) -> ScheduledBatch:
        first_token_ids: tuple[int, ...] = ()
        if pipelined:
            pairs = zip(self.chunks, self.requests, strict=True)
            first_token_ids = tuple(
                r.token_ids[start]
                if (start := chunk.num_computed_tokens) < len(r.token_ids)
                else IN_FLIGHT
                for chunk, r in pairs
            )
        chunks, admissions = tuple(self.chunks), tuple(self.admissions)
        return ScheduledBatch(step_id, chunks, admissions, first_token_ids=first_token_ids)


def emit_chunks(batch: ScheduledBatch, events: EventStream) -> None:
    """Tells each chunk, at the time at which the step stood."""
    now = events.now()
    for chunk in batch.chunks:
        events.emit(
            ChunkScheduled(
                now,
                chunk.request_id,
                batch.step_id,
                chunk.num_computed_tokens,
                chunk.num_new_tokens,
            )
        )
