"""Blocks of KV memory: who holds them, which can be reused, which is evicted next."""

from collections import OrderedDict
from collections.abc import Callable

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
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            block_hash = self._hash_of.pop(block_id)
            del self._block_of[block_hash]
            self._on_evict(block_id, block_hash)
        self._ref_counts[block_id] = 1
        return block_id

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block with this content, or None. No side effect."""
        return self._block_of.get(block_hash)

    def is_referenced(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 0

    def share(self, block_id: int) -> None:
        """Adds a reference to a block that ``lookup`` found."""
        self._cached.pop(block_id, None)
        self._ref_counts[block_id] += 1

    def publish(self, block_id: int, block_hash: BlockHash) -> bool:
        """Makes a full, referenced block findable. The first block with a content wins; False for
        others."""
        if block_hash in self._block_of or block_id in self._hash_of:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        return True

    def release(self, block_id: int) -> None:
        """Drops one reference; the last one makes the block cached or free."""
        if self._ref_counts[block_id] < 1:
            raise AssertionError(f"block {block_id} was released more often than taken")
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if block_id in self._hash_of:
                self._cached[block_id] = None
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
