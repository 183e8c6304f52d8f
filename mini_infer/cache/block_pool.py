"""Blocks of KV memory: who holds them, which can be reused, which is evicted next."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

BlockHash = bytes


class BlockPool:
    """A fixed number of blocks, each in exactly one of three states (PagedAttention, 2309.06180).

    ::

        free ──allocate──► referenced ──release──► free              (content not shareable)
                               ▲  │
                         share │  └──release──► cached ──allocate──► referenced   (evicts: LRU)
                               └────────────────────┘

    A *referenced* block belongs to one or more requests. A *cached* block belongs to nobody, but
    its content is a full block of known tokens that a later prompt may share. Blocks are evicted
    least recently released first.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, BlockHash], None] = lambda block_id, block_hash: None,
    ) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can hand out, evicting where needed."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` blocks with one reference each; None, and no change, if too few."""
        if count > self.num_available:
            return None
        first = max(0, len(self._free) - count)
        blocks = self._free[first:]
        blocks.reverse()
        del self._free[first:]
        while len(blocks) < count:
            blocks.append(self._evict())
        for block_id in blocks:
            self._ref_counts[block_id] = 1
        return blocks

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        self._on_evict(block_id, block_hash)
        return block_id

    def lookup(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks with these contents, up to the first that is not there. No side effect."""
        blocks: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks belong to nobody."""
        ref_counts = self._ref_counts
        return [ref_counts[block_id] for block_id in block_ids].count(0)

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to blocks that ``lookup`` found."""
        ref_counts, cached = self._ref_counts, self._cached
        for block_id in block_ids:
            if ref_counts[block_id] == 0:
                del cached[block_id]
            ref_counts[block_id] += 1

    def publish(
        self, block_ids: Iterable[int], block_hashes: Iterable[BlockHash]
    ) -> list[BlockHash]:
        """Makes full, referenced blocks findable. The first block with a content wins; returns the
        contents that are new."""
        block_of, hash_of = self._block_of, self._hash_of
        new: list[BlockHash] = []
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_hash not in block_of and block_id not in hash_of:
                block_of[block_hash] = block_id
                hash_of[block_id] = block_hash
                new.append(block_hash)
        return new

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each; the last one makes a block cached or free."""
        ref_counts, hash_of, cached = self._ref_counts, self._hash_of, self._cached
        for block_id in block_ids:
            count = ref_counts[block_id] - 1
            if count < 0:
                raise AssertionError(f"block {block_id} was released more often than taken")
            ref_counts[block_id] = count
            if count == 0:
                if block_id in hash_of:
                    cached[block_id] = None
                else:
                    self._free.append(block_id)

    def reset_cache(self) -> None:
        """Forgets all shareable content; referenced blocks stay with their requests."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of.clear()

    def check_invariants(self) -> None:
        """free + referenced + cached = total, and the two hash maps mirror each other."""
        free, cached = set(self._free), set(self._cached)
        referenced = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is in the free list twice"
        states = (free, cached, referenced)
        assert len(set().union(*states)) == sum(map(len, states)), "a block is in two states"
        assert len(free) + len(cached) + len(referenced) == self.num_blocks
        assert cached <= self._hash_of.keys(), "a cached block has no content hash"
        assert not free & self._hash_of.keys(), "a free block kept its content hash"
        assert {hash_: block for block, hash_ in self._hash_of.items()} == self._block_of
