"""The pool's three states, in pictures and at random."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mini_infer.cache.block_pool import BlockPool


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_available == 3
    assert len(pool.allocate(3) or []) == 3
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_blocks_are_distinct_and_in_range() -> None:
    assert sorted(BlockPool(5).allocate(5) or []) == [0, 1, 2, 3, 4]


def test_a_published_block_is_found_until_it_is_evicted() -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = BlockPool(2, on_evict=lambda *block: evicted.append(block))
    first, second = pool.allocate(2) or []
    pool.publish([first], [hash_of(1)])
    pool.publish([second], [hash_of(2)])
    pool.release([first])
    pool.release([second])
    assert pool.lookup([hash_of(1)]) == [first]
    assert pool.allocate(1) == [first]  # released first, so evicted first
    assert evicted == [(first, hash_of(1))]
    assert pool.lookup([hash_of(1)]) == []
    assert pool.lookup([hash_of(2)]) == [second]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, plain = pool.allocate(2) or []
    pool.publish([cached], [hash_of(1)])
    pool.release([cached])
    pool.release([plain])
    taken = pool.allocate(2) or []
    assert cached not in taken
    assert pool.lookup([hash_of(1)]) == [cached]


def test_sharing_revives_a_cached_block_and_counts_references() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.publish([block], [hash_of(1)])
    pool.release([block])
    pool.share([block])
    pool.share([block])
    assert pool.num_available == 0
    pool.release([block])
    assert pool.num_unreferenced([block]) == 0
    pool.release([block])
    assert pool.num_unreferenced([block]) == 1
    pool.check_invariants()


def test_a_look_up_ends_at_the_first_block_that_is_not_there() -> None:
    pool = BlockPool(3)
    first, _, third = pool.allocate(3) or []
    assert pool.publish([first, third], [hash_of(1), hash_of(3)]) == [hash_of(1), hash_of(3)]
    assert pool.lookup([hash_of(1), hash_of(2), hash_of(3)]) == [first]
    assert pool.lookup([]) == []


def test_of_a_run_only_what_is_new_is_published() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4) or []
    hashes = [hash_of(number) for number in range(4)]
    assert pool.publish(blocks[:2], hashes[:2]) == hashes[:2]
    assert pool.publish(blocks, hashes) == hashes[2:]
    assert pool.lookup(hashes) == blocks
    assert pool.publish(blocks, hashes) == []


def test_blocks_are_taken_from_the_free_ones_then_from_the_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4) or []
    pool.publish(blocks[:2], [hash_of(0), hash_of(1)])
    pool.release(reversed(blocks))
    assert pool.num_unreferenced(blocks) == 4
    # Freed last, taken first; cached first, evicted first.
    assert pool.allocate(4) == [blocks[2], blocks[3], blocks[1], blocks[0]]
    pool.check_invariants()


def test_a_look_up_changes_nothing() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2) or []
    for number, block in enumerate(blocks):
        pool.publish([block], [hash_of(number)])
        pool.release([block])
    for _ in range(3):
        pool.lookup([hash_of(0)])
    assert pool.allocate(1) == [blocks[0]]  # still the least recently released


def test_the_first_block_with_a_content_wins() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.publish([first], [hash_of(1)])
    pool.publish([second], [hash_of(1)])
    assert pool.lookup([hash_of(1)]) == [first]
    pool.release([second])
    pool.check_invariants()


def test_releasing_too_often_is_caught() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.release([block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_reset_forgets_content_but_not_references() -> None:
    pool = BlockPool(2)
    held, cached = pool.allocate(2) or []
    pool.publish([held], [hash_of(1)])
    pool.publish([cached], [hash_of(2)])
    pool.release([cached])
    pool.reset_cache()
    assert pool.lookup([hash_of(1)]) == []
    assert pool.lookup([hash_of(2)]) == []
    assert pool.num_unreferenced([held]) == 0
    pool.check_invariants()
    pool.release([held])
    assert pool.num_available == 2


class PoolMachine(RuleBasedStateMachine):
    """Random life of a small pool against a model of what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(5, on_evict=self.evicted)
        self.held: list[int] = []
        self.content: dict[int, bytes] = {}
        self.counter = 0

    def evicted(self, block: int, block_hash: bytes) -> None:
        assert block not in self.held
        assert self.content.pop(block) == block_hash

    @rule(count=st.integers(0, 3))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if blocks is None:
            assert count > 5 - len(set(self.held))
        else:
            assert not set(blocks) & set(self.held)
            self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        hashes = [hash_of(self.counter + number) for number in range(len(blocks))]
        self.counter += len(blocks)
        new = [
            hash_ for block, hash_ in zip(blocks, hashes, strict=True) if block not in self.content
        ]
        assert self.pool.publish(blocks, hashes) == new
        self.content = dict(zip(blocks, hashes, strict=True)) | self.content

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.content)), unique=True))
        hashes = [self.content[block] for block in blocks]
        assert self.pool.lookup([*hashes, b"of none", *hashes]) == blocks
        unreferenced = len(set(blocks) - set(self.held))
        assert self.pool.num_unreferenced(blocks) == unreferenced
        self.pool.share(blocks)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        for block in blocks:
            self.held.remove(block)
        self.pool.release(blocks)

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        self.content.clear()

    @invariant()
    def consistent(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_referenced == len(set(self.held))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
