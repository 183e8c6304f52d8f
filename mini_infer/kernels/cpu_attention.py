"""Paged attention on a CPU: rows of equal query length go through one batched call.

A decode batch has one query a row, drafts to verify have 1 + k, a chunk of a prompt is usually a
group of its own; contexts too different to pad to each other part a group. Nothing here asks for
phases. What depends only on the step (which blocks, which keys are visible) is computed once and
serves all layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MAX_PADDING = 12
"""Blocks that a group may pad its rows by: attending to more costs more than another call."""

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
    """Groups a step's rows by query length, and by context where padding would cost too much."""
    num_blocks = [-(-context // block_size) for context in context_lens]
    first_tokens = [0, *accumulate(query_lens)]
    alike: dict[tuple[int, bool], list[int]] = {}
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        at_zero = query_len == context_len and query_len > 1
        alike.setdefault((query_len, at_zero), []).append(row)
    groups = []
    for (query_len, at_zero), same_query in alike.items():
        for rows in _split_by_context(same_query, num_blocks):
            firsts = torch.tensor([first_tokens[row] for row in rows])
            width = max(num_blocks[row] for row in rows)
            groups.append(
                RowGroup(
                    tokens=(firsts[:, None] + torch.arange(query_len)).flatten(),
                    block_ids=block_table[torch.tensor(rows), :width].flatten(),
                    seqlens_k=torch.tensor([context_lens[row] for row in rows]),
                    query_len=query_len,
                    starts_at_zero=at_zero,
                )
            )
    return tuple(groups)


def _split_by_context(rows: list[int], num_blocks: Sequence[int]) -> list[list[int]]:
    """Parts whose contexts are padded by at most ``MAX_PADDING`` blocks in all; rows in order."""
    parts: list[list[int]] = []
    padding = width = 0
    for row in sorted(rows, key=num_blocks.__getitem__, reverse=True):
        padding += width - num_blocks[row]
        if not parts or padding > MAX_PADDING:
            parts.append([])
            padding, width = 0, num_blocks[row]
        parts[-1].append(row)
    return [sorted(part) for part in parts]


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


def _gather(k_cache: Tensor, v_cache: Tensor, group: RowGroup) -> tuple[Tensor, Tensor]:
    """The group's keys and values, each ``[R, Hkv, S, D]``; in one pass where they lie together."""
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    token_size = num_kv_heads * head_dim
    distance = v_cache.storage_offset() - k_cache.storage_offset()
    if k_cache.stride(1) == 2 * token_size and distance == token_size:
        pairs = k_cache.as_strided(
            (num_blocks, block_size * 2 * token_size),
            (k_cache.stride(0), 1),
            k_cache.storage_offset(),
        )
        rows = pairs.index_select(0, group.block_ids)
        both = rows.view(group.num_rows, -1, 2 * num_kv_heads, head_dim).transpose(1, 2)
        return both[:, :num_kv_heads], both[:, num_kv_heads:]
    k, v = (
        cache.reshape(num_blocks, -1)
        .index_select(0, group.block_ids)
        .view(group.num_rows, -1, num_kv_heads, head_dim)
        .transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    return k, v


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
    k, v = (gathered.to(q.dtype) for gathered in _gather(k_cache, v_cache, group))
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
