"""What a draft model has seen of each request, against a simulation that knows every token."""

import random
from collections.abc import Sequence

import pytest

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling.proposers.draft_progress import PLAIN_STEPS, DraftProgress, Gap

SIZE = 4
"""Tokens of a block."""


def progress(most_at_once: int = 1000, most_in_flight: int = 0) -> DraftProgress:
    return DraftProgress(64, SIZE, most_in_flight, most_at_once)


def admission(slot: int, block_ids: Sequence[int] = ()) -> Admission:
    return Admission(str(slot), slot, (), 0, SamplingParams(), 0, block_ids=tuple(block_ids))


def chunk(
    slot: int,
    start: int,
    length: int,
    *,
    blocks: Sequence[int] = (),
    samples: bool = True,
    drafts: int = 0,
    proposed: int = 0,
    known: bool = True,
) -> Chunk:
    return Chunk(
        request_id=str(slot),
        slot=slot,
        num_computed_tokens=start,
        num_new_tokens=length,
        new_block_ids=tuple(blocks),
        samples=samples,
        num_drafts=drafts,
        start_known=known,
        num_proposed=proposed,
    )


def step(*chunks: Chunk, admissions: Sequence[Admission] = ()) -> ScheduledBatch:
    return ScheduledBatch(0, chunks, tuple(admissions))


def test_a_prompt_is_followed_chunk_by_chunk() -> None:
    seen = progress()
    first = step(chunk(0, 0, 8, blocks=range(8), samples=False), admissions=[admission(0)])
    assert seen.follow(first) == [Gap(0, 0, 8)]
    # The last two tokens are the proposals' own first pass: the sampled one, and the one before.
    assert seen.follow(step(chunk(0, 8, 5, proposed=3))) == [Gap(0, 8, 4)]
    assert seen.follow(step(chunk(0, 13, 4, drafts=3, proposed=3))) == []
    assert seen.follow(step(chunk(0, 15, 1, proposed=3))) == []


def test_nothing_is_computed_while_drafts_are_off() -> None:
    seen = progress()
    whole = step(chunk(0, 0, 9, blocks=range(8)), admissions=[admission(0)])
    assert seen.follow(whole) == []
    for index in range(PLAIN_STEPS):
        assert seen.follow(step(chunk(0, 9 + index, 1))) == []
    other = chunk(1, 0, 4, blocks=[9], samples=False)
    assert seen.follow(step(other, admissions=[admission(1)])) == []
    # Then all that was missed, of whoever drafts or is still a prompt.
    start = 9 + PLAIN_STEPS
    on = step(chunk(0, start, 1, proposed=2), chunk(1, 4, 4, blocks=[10], samples=False))
    assert seen.follow(on) == [Gap(0, 0, start), Gap(1, 0, 8)]


def test_a_request_at_its_end_does_not_switch_them_off() -> None:
    seen = progress()
    seen.follow(step(chunk(0, 0, 8, blocks=range(8), proposed=3), admissions=[admission(0)]))
    seen.follow(step(chunk(0, 8, 4, drafts=3)))
    prompt = step(chunk(1, 0, 8, blocks=[9, 10], samples=False), admissions=[admission(1)])
    assert seen.follow(prompt) == [Gap(1, 0, 8)]


def test_a_request_that_goes_on_alone_is_caught_up() -> None:
    seen = progress()
    seen.follow(step(chunk(0, 0, 8, blocks=range(8), proposed=3), admissions=[admission(0)]))
    seen.follow(step(chunk(0, 8, 4, drafts=3, proposed=3)))  # 2 accepted
    seen.follow(step(chunk(0, 11, 1)))
    seen.follow(step(chunk(0, 12, 1)))
    # Seen for certain: up to the sampled token at 9, if no draft before it had been accepted.
    assert seen.follow(step(chunk(0, 13, 1, proposed=3))) == [Gap(0, 10, 3)]
    assert seen.follow(step(chunk(0, 14, 4, drafts=3, proposed=3))) == []


def test_much_that_is_missed_is_spread_over_steps() -> None:
    seen = progress(most_at_once=6)
    slots = range(2)
    seen.follow(
        step(
            *(chunk(slot, 0, 9, blocks=range(8 * slot, 8 * slot + 8)) for slot in slots),
            admissions=[admission(slot) for slot in slots],
        )
    )
    gaps = [
        seen.follow(step(*(chunk(slot, 9 + n, 1, proposed=1) for slot in slots))) for n in range(5)
    ]
    assert gaps[0] == [Gap(0, 0, 6)]
    assert gaps[1] == [Gap(0, 6, 4), Gap(1, 0, 2)]
    assert gaps[2] == [Gap(1, 2, 6)]
    assert gaps[3] == [Gap(1, 8, 4)]
    assert gaps[4] == []


def test_shared_blocks_are_seen_once() -> None:
    seen = progress()
    seen.follow(step(chunk(0, 0, 9, blocks=range(3), proposed=1), admissions=[admission(0)]))
    shared = admission(1, block_ids=[0, 1])
    assert seen.follow(step(chunk(1, 8, 5, blocks=[5, 6], proposed=1), admissions=[shared])) == [
        Gap(1, 8, 4)
    ]
    # A block that somebody else got holds nothing of his yet.
    seen.follow(step(chunk(2, 0, 2, blocks=[1], proposed=1), admissions=[admission(2)]))
    again = admission(3, block_ids=[0, 1])
    assert seen.follow(step(chunk(3, 8, 5, blocks=[7, 8], proposed=1), admissions=[again])) == [
        Gap(3, 4, 8)
    ]


def test_blocks_that_nobody_saw_are_computed_by_the_first() -> None:
    seen = progress()
    seen.follow(step(chunk(0, 0, 9, blocks=range(3)), admissions=[admission(0)]))
    both = [admission(1, block_ids=[0, 1]), admission(2, block_ids=[0, 1])]
    chunks = [chunk(slot, 8, 5, blocks=[3 * slot, 3 * slot + 1], proposed=1) for slot in (1, 2)]
    assert seen.follow(step(*chunks, admissions=both)) == [Gap(1, 0, 12), Gap(2, 8, 4)]


def test_a_start_that_only_the_device_knows() -> None:
    """Counts are those for certain, however many drafts in flight are accepted."""
    seen = progress(most_in_flight=3)
    seen.follow(step(chunk(0, 0, 8, blocks=range(8), proposed=3), admissions=[admission(0)]))
    seen.follow(step(chunk(0, 8, 4, drafts=3, proposed=3)))
    seen.follow(step(chunk(0, 12, 4, drafts=3, known=False)))  # starts at 9 or later
    seen.follow(step(chunk(0, 14, 1)))
    assert seen.follow(step(chunk(0, 15, 1, proposed=3))) == [Gap(0, 10, 5)]


class Simulation:
    """Requests that come, go and share prefixes; of each place in the cache, which tokens the draft
    model had before it when it computed it."""

    def __init__(self, rng: random.Random, num_blocks: int = 24, num_slots: int = 3) -> None:
        self.rng = rng
        self.seen = DraftProgress(num_blocks, SIZE, 0, 1000)
        self.free = list(range(num_blocks))
        self.free_slots = list(range(num_slots))
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.cached: dict[tuple[int, ...], int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.drafts: dict[int, int] = {}
        self.num_checked = 0

    def write(self, slot: int, position: int) -> None:
        """The draft model computes a position: rightly, if all before it are right."""
        tokens = tuple(self.tokens[slot][: position + 1])
        self.kv[self.place(slot, position)] = tokens if self.is_right(slot, position) else ()

    def is_right(self, slot: int, end: int) -> bool:
        tokens = tuple(self.tokens[slot])
        return all(self.kv.get(self.place(slot, i)) == tokens[: i + 1] for i in range(end))

    def place(self, slot: int, position: int) -> tuple[int, int]:
        return self.blocks[slot][position // SIZE], position % SIZE

    def admit(self) -> Admission | None:
        if not self.free_slots or len(self.free) < 8:
            return None
        slot = self.free_slots.pop(self.rng.randrange(len(self.free_slots)))
        # Of two tokens only: prefixes meet.
        length = self.rng.randint(1, 14)
        tokens = [self.rng.randint(1, 2) if i % 5 == 0 else 1 for i in range(length)]
        hits: list[int] = []
        while (end := (len(hits) + 1) * SIZE) < length and tuple(tokens[:end]) in self.cached:
            hits.append(self.cached[tuple(tokens[:end])])
        for block in hits:
            if block in self.free:
                self.free.remove(block)
        self.tokens[slot], self.blocks[slot] = tokens, list(hits)
        self.computed[slot], self.drafts[slot] = len(hits) * SIZE, 0
        return admission(slot, hits)

    def allocate(self, slot: int, num_tokens: int) -> list[int]:
        new: list[int] = []
        while (len(self.blocks[slot]) + len(new)) * SIZE < num_tokens:
            block = self.free.pop(self.rng.randrange(len(self.free)))
            self.cached = {key: b for key, b in self.cached.items() if b != block}
            new.append(block)
        self.blocks[slot] += new
        return new

    def finish(self, slot: int) -> None:
        """Gives back what no other request holds; full blocks stay findable."""
        for index, block in enumerate(self.blocks[slot]):
            end = (index + 1) * SIZE
            if end <= self.computed[slot]:
                self.cached.setdefault(tuple(self.tokens[slot][:end]), block)
            holders = [other for other in self.tokens if block in self.blocks[other]]
            if holders == [slot]:
                self.free.append(block)
        del self.tokens[slot]
        self.free_slots.append(slot)

    def run_step(self, num_proposed: int) -> None:
        newcomer = self.admit()
        admissions = [] if newcomer is None else [newcomer]
        chunks = []
        for slot in self.tokens:
            left = len(self.tokens[slot]) - self.computed[slot]
            length = min(left, self.rng.randint(1, 6))
            samples = length == left
            proposed = num_proposed if samples and self.rng.random() < 0.9 else 0
            drafts = self.drafts[slot] if samples else 0
            start = self.computed[slot]
            new = self.allocate(slot, start + length + drafts + proposed + 1)
            chunks.append(
                chunk(
                    *(slot, start, length + drafts),
                    blocks=new,
                    samples=samples,
                    drafts=drafts,
                    proposed=proposed,
                )
            )
        if not chunks:
            return
        for gap in self.seen.follow(step(*chunks, admissions=admissions)):
            for position in range(gap.start, gap.start + gap.length):
                self.write(gap.slot, position)
        for each in chunks:
            self.finish_chunk(each)

    def finish_chunk(self, each: Chunk) -> None:
        slot = each.slot
        accepted = self.rng.randint(0, each.num_drafts)
        self.computed[slot] += each.num_new_tokens - each.num_drafts + accepted
        if not each.samples:
            return
        # Tokens of accepted drafts, which the draft model knew, and then the sampled one.
        tokens = self.tokens[slot]
        while len(tokens) <= self.computed[slot]:
            tokens.append(self.accepted_token(slot, len(tokens), accepted))
        self.drafts[slot] = each.num_proposed
        if each.num_proposed:
            last = self.computed[slot]
            assert self.is_right(slot, last - 1)
            self.num_checked += 1
            self.write(slot, last - 1)
            self.write(slot, last)
            for ahead in range(1, each.num_proposed):
                # Its guess, which the next step may accept: token 1, or a wrong one.
                self.kv[self.place(slot, last + ahead)] = (*tokens, *[1] * ahead)

    def accepted_token(self, slot: int, position: int, accepted: int) -> int:
        return 1 if accepted and position < self.computed[slot] else self.rng.randint(1, 3)


@pytest.mark.parametrize("seed", range(40))
def test_whoever_proposes_has_seen_all_before(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(rng)
    is_on = True
    for _ in range(60):
        if rng.random() < 0.15:
            is_on = not is_on
        simulation.run_step(rng.randint(1, 3) if is_on else 0)
        for slot in list(simulation.tokens):
            if rng.random() < 0.1 or len(simulation.tokens[slot]) > 25:
                simulation.finish(slot)
    assert simulation.num_checked > 5
