"""Paged attention on a CPU: rows of equal query length go through one batched call.

A decode batch is one group with one query a row, drafts to verify are a group with 1 + k, a chunk
of a prompt is usually a group of its own. Nothing here asks for phases. What depends only on the
step (which blocks, which keys are visible) is computed once and serves all layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SMALLEST_BUCKET = 16
"""Blocks. Contexts up to this long are padded to each other rather than split into groups."""

ONE_THREAD_BLOCKS = 16
"""Up to here one thread attends faster than several: see docs/performance-notes.md."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """R rows with Q queries each over contexts of at most B blocks.

    Shapes: ``tokens [R * Q]`` rows of the step's tokens, ``block_ids [R * B]``,
    ``seqlens_k [R]``.
    """

    tokens: Tensor
    block_ids: Tensor
    seqlens_k: Tensor
    query_len: int
    max_seqlen_k: int
    starts_at_zero: bool
    """Queries and keys are the same tokens, so plain causal attention needs no mask."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By sliding window; layers share them."""

    @property
    def num_rows(self) -> int:
        return len(self.seqlens_k)

    def mask(self, num_keys: int, window: int | None) -> Tensor:
        """Additive mask ``[R, 1, Q, num_keys]``: 0 where a query may look, else -inf."""
        if window not in self.masks:
            ends = self.seqlens_k.view(-1, 1, 1)
            queries = ends - self.query_len + torch.arange(self.query_len).view(1, -1, 1)
            keys = torch.arange(num_keys).view(1, 1, -1)
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
            self.masks[window] = mask.unsqueeze(1)
        return self.masks[window]


def group_rows(
    query_lens: Sequence[int], context_lens: Sequence[int], block_table: Tensor, block_size: int
) -> tuple[RowGroup, ...]:
    """Groups a step's rows by query length, and by context so that none is padded over twofold."""
    members: dict[tuple[int, int, bool], list[int]] = {}
    first_tokens: list[int] = []
    num_tokens = 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        bucket = max(SMALLEST_BUCKET, 1 << (-(-context_len // block_size) - 1).bit_length())
        at_zero = query_len == context_len and query_len > 1
        members.setdefault((query_len, bucket, at_zero), []).append(row)
        first_tokens.append(num_tokens)
        num_tokens += query_len
    groups = []
    for (query_len, _, at_zero), rows in members.items():
        max_context = max(context_lens[row] for row in rows)
        firsts = torch.tensor([first_tokens[row] for row in rows])
        blocks = block_table[torch.tensor(rows), : -(-max_context // block_size)]
        groups.append(
            RowGroup(
                tokens=(firsts[:, None] + torch.arange(query_len)).flatten(),
                block_ids=blocks.flatten(),
                seqlens_k=torch.tensor([context_lens[row] for row in rows]),
                query_len=query_len,
                max_seqlen_k=max_context,
                starts_at_zero=at_zero,
            )
        )
    return tuple(groups)


def grouped_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    groups: Sequence[RowGroup],
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """``q [T, H, D]`` over caches ``[num_blocks, block_size, Hkv, D]`` -> ``[T, H, D]``."""
    if len(groups) == 1:  # its tokens are all tokens, in order
        with _threads_for(groups[0]):
            return _attend(q, k_cache, v_cache, groups[0], scale, sliding_window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in groups:
        queries = q.index_select(0, group.tokens)
        out.index_copy_(
            0, group.tokens, _attend(queries, k_cache, v_cache, group, scale, sliding_window)
        )
    return out


@contextmanager
def _threads_for(group: RowGroup) -> Iterator[None]:
    """One thread for little work: a second core would wait longer for the keys that the first has
    just gathered than it saves."""
    if group.query_len * len(group.block_ids) > ONE_THREAD_BLOCKS:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: RowGroup,
    scale: float,
    window: int | None,
) -> Tensor:
    num_rows, query_len = group.num_rows, group.query_len
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    k, v = (
        cache.view(cache.shape[0], -1)
        .index_select(0, group.block_ids)
        .to(q.dtype)
        .view(num_rows, -1, num_kv_heads, head_dim)
        .transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    if query_len == 1:
        # The heads that share keys become queries of one head: one pass over the keys serves all.
        folded = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        mask = group.mask(k.shape[2], window).to(q.dtype)
        out = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
        return out.reshape(num_rows, num_heads, head_dim)
    queries = q.reshape(num_rows, query_len, num_heads, head_dim).transpose(1, 2)
    if group.starts_at_zero and (window is None or window >= query_len):
        k, v = k[:, :, :query_len], v[:, :, :query_len]
        out = scaled_dot_product_attention(
            queries, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
    else:
        mask = group.mask(k.shape[2], window).to(q.dtype)
        out = scaled_dot_product_attention(
            queries, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
    return out.transpose(1, 2).reshape(num_rows * query_len, num_heads, head_dim)
