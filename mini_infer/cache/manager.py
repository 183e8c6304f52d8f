"""Maps each request's tokens to KV blocks, and finds prompts whose KV is already there."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer.cache.block_pool import BlockHash, BlockPool
from mini_infer.cache.prefix_hash import extend_block_hashes
from mini_infer.core.events import (
    BlockEvicted,
    BlocksAllocated,
    BlocksCached,
    BlocksReleased,
    EventStream,
    PrefixCacheReset,
)
from mini_infer.core.request import Request

WORTH_WAITING = 256
"""Tokens that are worth a step's wait: computing fewer beside others hardly lengthens a step."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest run of full blocks at a request's head whose KV exists."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_growing_tokens: int = 0
    """Tokens of the blocks after these that others are computing: soon they will match too."""

    def is_worth_waiting_for(self, num_tokens: int) -> bool:
        """Is enough of what a request of ``num_tokens`` lacks being computed for others?"""
        growing = self.num_growing_tokens
        return growing >= WORTH_WAITING or 2 * growing >= num_tokens - self.num_tokens


NO_MATCH = PrefixMatch()


class KVCacheManager:
    """Block tables of all admitted requests over one ``BlockPool``.

    ::

        |--- shared with others ---|--- own, full ---|- own, partly filled -|
        0                                num_committed            <= 1 block wasted

    Only full blocks whose tokens are verified are committed, that is, findable by other requests.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        events: EventStream,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._events = events
        self._pool = BlockPool(num_blocks, on_evict=self._emit_evicted)
        self._tables: dict[str, list[int]] = {}
        self._num_committed: dict[str, int] = {}
        self._computing: dict[bytes, str] = {}
        """Hashes of blocks of known tokens that a request took and has yet to commit."""

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_referenced

    @property
    def num_available_blocks(self) -> int:
        return self._pool.num_available

    def block_table(self, request: Request) -> tuple[int, ...]:
        return tuple(self._tables.get(request.request_id, ()))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def looks_up(self, request: Request) -> bool:
        """Whether ``request`` may use cached prefixes at all.

        Prompt log-probabilities need every position's logits, so such a request may not.
        """
        return self.enable_prefix_caching and request.params.prompt_logprobs is None

    def match_prefix(self, request: Request) -> PrefixMatch:
        """Looks up the longest cached prefix; changes nothing in the pool.

        The last token is never matched: its forward pass gives the logits that are sampled.
        """
        if not self.looks_up(request):
            return NO_MATCH
        hashes = self._hashes(request)[: (len(request.token_ids) - 1) // self.block_size]
        block_ids = self._pool.lookup(hashes)
        num_growing = 0
        for hash_ in hashes[len(block_ids) :]:
            if hash_ not in self._computing:
                break
            num_growing += 1
        size = self.block_size
        return PrefixMatch(tuple(block_ids), len(block_ids) * size, num_growing * size)

    def blocks_needed(
        self, request: Request, num_new_tokens: int, prefix: PrefixMatch = NO_MATCH
    ) -> int:
        """Blocks that ``allocate`` would take from the available ones, revived hits included."""
        have = len(self._tables.get(request.request_id, ())) + len(prefix.block_ids)
        end = max(request.num_computed_tokens, prefix.num_tokens) + num_new_tokens
        return max(0, self.blocks_for(end) - have) + self._pool.num_unreferenced(prefix.block_ids)

    def allocate(
        self, request: Request, num_new_tokens: int, prefix: PrefixMatch = NO_MATCH
    ) -> list[int] | None:
        """Makes room for ``num_new_tokens`` after the computed ones.

        With a ``prefix`` (at admission only) its blocks become the head of the request's table.
        Returns the newly taken blocks, in order, or None and no change when too few are left.
        """
        if request.num_computed_tokens + num_new_tokens <= request.kv_capacity:
            return []
        if self.blocks_needed(request, num_new_tokens, prefix) > self._pool.num_available:
            return None
        table = self._tables.setdefault(request.request_id, [])
        if not table and self.enable_prefix_caching:
            for hash_ in self._hashes(request)[len(prefix.block_ids) :]:
                self._computing.setdefault(hash_, request.request_id)
        if prefix.block_ids:
            assert not table, "a prefix can only head an empty block table"
            self._pool.share(prefix.block_ids)  # before taking others, or they could be evicted
            table.extend(prefix.block_ids)
            self._num_committed[request.request_id] = len(table)
        end = max(request.num_computed_tokens, prefix.num_tokens) + num_new_tokens
        new_blocks = self._pool.allocate(max(0, self.blocks_for(end) - len(table)))
        assert new_blocks is not None, "blocks_needed promised enough"
        table.extend(new_blocks)
        request.kv_capacity = len(table) * self.block_size
        if new_blocks and self._events.wants(BlocksAllocated):
            self._events.emit(
                BlocksAllocated(self._events.now(), request.request_id, tuple(new_blocks))
            )
        return new_blocks

    def commit(self, request: Request, num_valid_tokens: int) -> None:
        """Publishes the full blocks among the first ``num_valid_tokens`` tokens, whose KV must be
        written and whose ids must be final (a rejected draft never gets here)."""
        if not self.enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        first = self._num_committed.get(request.request_id, 0)
        last = min(num_valid_tokens // self.block_size, len(table))
        if last <= first:
            return
        hashes = self._hashes(request)[first:last]
        new = self._pool.publish(table[first:last], hashes)
        self._end_computing(request, hashes)
        self._num_committed[request.request_id] = last
        if new and self._events.wants(BlocksCached):
            self._events.emit(BlocksCached(self._events.now(), request.request_id, tuple(new)))

    def release(self, request: Request) -> None:
        """Gives back all blocks, tail first, so that a shared head is evicted last."""
        request.kv_capacity = 0
        table = self._tables.pop(request.request_id, [])
        num_committed = self._num_committed.pop(request.request_id, 0)
        self._end_computing(request, request.block_hashes[num_committed:])
        self._pool.release(reversed(table))
        if table:
            self._events.emit(BlocksReleased(self._events.now(), request.request_id, len(table)))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content. Blocks of running requests are no longer shareable."""
        self._pool.reset_cache()
        self._events.emit(PrefixCacheReset(self._events.now()))

    def check_invariants(self) -> None:
        """free + referenced + cached = total, and every table entry is referenced."""
        self._pool.check_invariants()
        held = [block for table in self._tables.values() for block in table]
        assert self._pool.num_unreferenced(held) == 0
        assert len(set(held)) == self._pool.num_referenced
        assert set(self._computing.values()) <= self._tables.keys()

    def _end_computing(self, request: Request, hashes: Sequence[bytes]) -> None:
        computing, request_id = self._computing, request.request_id
        for hash_ in hashes:
            if computing.get(hash_) == request_id:
                del computing[hash_]

    def _hashes(self, request: Request) -> list[bytes]:
        extend_block_hashes(
            request.block_hashes, request.token_ids, self.block_size, request.cache_salt
        )
        return request.block_hashes

    def _emit_evicted(self, block_id: int, block_hash: BlockHash) -> None:
        if self._events.wants(BlockEvicted):
            self._events.emit(BlockEvicted(self._events.now(), block_id, block_hash))
