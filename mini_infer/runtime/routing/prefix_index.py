"""Which replica holds which prefix: the sum of what their caches tell of themselves."""

from collections.abc import Sequence

from mini_infer.core.events import BlockEvicted, BlocksCached, Event, PrefixCacheReset


class PrefixIndex:
    """Maps the hash of each cached block to the replicas that hold it.

    A block's hash stands for all tokens up to its end (``cache/prefix_hash.py``), so the length of
    a prompt's cached prefix is how many of its hashes, from the first, a replica holds. The index
    is exact, and late by as long as an event takes: what is being computed is not in it.
    """

    KINDS: tuple[type[Event], ...] = (BlocksCached, BlockEvicted, PrefixCacheReset)

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        """A bit per replica."""

    def __len__(self) -> int:
        return len(self._holders)

    def observe(self, replica: int, event: Event) -> None:
        """Takes in an event of these ``KINDS``."""
        holders, bit = self._holders, 1 << replica
        match event:
            case BlocksCached():
                for block_hash in event.block_hashes:
                    holders[block_hash] = holders.get(block_hash, 0) | bit
            case BlockEvicted():
                self._drop(event.block_hash, bit)
            case PrefixCacheReset():
                self.forget(replica)

    def forget(self, replica: int) -> None:
        """Its cache is empty: it was told to, or the engine is gone."""
        bit = 1 << replica
        for block_hash in [item for item, held in self._holders.items() if held & bit]:
            self._drop(block_hash, bit)

    def num_cached_blocks(self, block_hashes: Sequence[bytes], num_replicas: int) -> list[int]:
        """By replica, how many of these blocks, from the first, it holds."""
        lengths = [len(block_hashes)] * num_replicas
        remaining = (1 << num_replicas) - 1
        for length, block_hash in enumerate(block_hashes):
            held = self._holders.get(block_hash, 0)
            lost = remaining & ~held
            if lost:
                remaining &= held
                for replica in range(num_replicas):
                    if lost >> replica & 1:
                        lengths[replica] = length
                if not remaining:
                    break
        return lengths

    def _drop(self, block_hash: bytes, bit: int) -> None:
        held = self._holders.get(block_hash, 0) & ~bit
        if held:
            self._holders[block_hash] = held
        else:
            self._holders.pop(block_hash, None)
