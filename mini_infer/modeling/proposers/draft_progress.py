"""How far a draft model has come with each request: kept on the host, from the steps themselves.

A draft model has keys and values of its own, and a request may have moved on without it: while
drafts were off, or in blocks that another request left in the prefix cache. Its proposals are worth
nothing until it has seen what it missed.
"""

from typing import NamedTuple

from mini_infer.core.batch import Chunk, ScheduledBatch

PLAIN_STEPS = 8
"""After so many steps without proposals drafts are off. Fewer come of requests near their ends."""


class Gap(NamedTuple):
    """``length`` tokens of a request from ``start`` on, to be computed before it can draft."""

    slot: int
    start: int
    length: int


class DraftProgress:
    """Leading tokens of each slot's request whose keys and values are there, and blocks that are
    full of such.

    All counts are lower bounds. Too low a count has tokens computed again, too high a one only
    costs accepted drafts.
    """

    def __init__(
        self, num_blocks: int, block_size: int, most_in_flight: int, most_at_once: int
    ) -> None:
        """``most_in_flight`` drafts of a request may be in steps of which the host does not know
        the result; a step computes ``most_at_once`` missed tokens, and leaves the rest to later
        ones, rather than keep everybody waiting."""
        self._block_size = block_size
        self._most_in_flight = most_in_flight
        self._most_at_once = most_at_once
        self._num_seen: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        self._num_shared: dict[int, int] = {}
        """Blocks at the head that came with a prefix hit."""
        self._is_seen = bytearray(num_blocks)
        self._in_step: set[int] = set()
        """Slots whose last step ended with proposals, all before it seen: nothing is missed."""
        self._num_plain_steps = 0

    def follow(self, batch: ScheduledBatch) -> list[Gap]:
        """Takes in a step. Returns what has to be computed before its proposals.

        Nothing while drafts are off, so that the draft model costs nothing then. While they are on,
        prompts are followed chunk by chunk.
        """
        self._take_in(batch)
        if any(chunk.num_proposed for chunk in batch.chunks):
            self._num_plain_steps = 0
        elif any(chunk.samples for chunk in batch.chunks):
            self._num_plain_steps += 1
        if self._num_plain_steps >= PLAIN_STEPS:
            self._in_step.clear()
            return []
        gaps: list[Gap] = []
        budget = self._most_at_once
        for chunk in batch.chunks:
            gap = self._follow_chunk(chunk, budget)
            if gap is not None:
                gaps.append(gap)
                budget -= gap.length
        return gaps

    def _take_in(self, batch: ScheduledBatch) -> None:
        for admission in batch.admissions:
            slot = admission.slot
            self._blocks[slot], self._num_seen[slot] = list(admission.block_ids), 0
            self._num_shared[slot] = len(admission.block_ids)
            self._in_step.discard(slot)
        for chunk in batch.chunks:
            if chunk.new_block_ids:
                self._blocks[chunk.slot] += chunk.new_block_ids
                for block in chunk.new_block_ids:
                    self._is_seen[block] = False

    def _follow_chunk(self, chunk: Chunk, budget: int) -> Gap | None:
        slot = chunk.slot
        # Tokens that stand for certain before what the step samples.
        end = chunk.num_computed_tokens + chunk.num_new_tokens - chunk.num_drafts
        if not chunk.start_known:
            end = max(0, end - self._most_in_flight)
        if chunk.samples and not chunk.num_proposed:
            self._in_step.discard(slot)
            return None
        gap = None
        if slot not in self._in_step:
            # Proposing begins with a pass over the last two tokens: ``end`` and the one before.
            wanted = end - 1 if chunk.num_proposed and not chunk.num_drafts else end
            start = self._skip_seen_blocks(slot)
            length = min(wanted - start, budget)
            if length > 0:
                gap = Gap(slot, start, length)
                self._advance(slot, start + length)
            if not chunk.num_proposed or self._num_seen[slot] < wanted:
                return gap
            self._in_step.add(slot)
        self._advance(slot, end + 1)
        return gap

    def _skip_seen_blocks(self, slot: int) -> int:
        """Tokens seen, those included that another request with this one's prefix has brought."""
        blocks, size = self._blocks[slot], self._block_size
        count = self._num_seen[slot] // size
        while count < self._num_shared[slot] and self._is_seen[blocks[count]]:
            count += 1
        self._num_seen[slot] = max(self._num_seen[slot], count * size)
        return self._num_seen[slot]

    def _advance(self, slot: int, end: int) -> None:
        blocks, size, seen = self._blocks[slot], self._block_size, self._num_seen[slot]
        end = min(end, len(blocks) * size)  # what has no room is nowhere
        if end > seen:
            for block in blocks[seen // size : end // size]:
                self._is_seen[block] = True
            self._num_seen[slot] = end
