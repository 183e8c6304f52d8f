"""Paged attention: which kernel takes which rows, with which tiles."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton.launch import (
    num_sms,
    power_of_two,
    shared_memory,
    starts_early,
)
from mini_infer.kernels.triton.split_attention import reduce_kernel, split_kernel
from mini_infer.kernels.triton.tiled_attention import tiled_kernel

SHORT_QUERY = 8
"""Queries of a row up to which it is split over its context: one token, or that and its drafts."""
WIDE_BONUS = 0.1
"""Share of the processors that wide tiles may leave idle and still be faster."""
MAX_SPLITS = 128
REDUCED_DIMS = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of a program's work, and the resources that it gets."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How the rows of short queries share the card."""

    num_splits: int
    tiles: Tiles


def long_tiles(head_bytes: int, group: int, shared_memory: int) -> Tiles:
    """Tiles of ``tiled_kernel``: the fastest of those tried on an H200, or what fits."""
    rows = max(128 if head_bytes <= 512 else 64, power_of_two(group))
    if head_bytes <= 256:
        tiles = Tiles(rows, 64, num_warps=8, num_stages=3)
    else:
        tiles = Tiles(rows, 32, num_warps=8 if rows >= 128 else 4, num_stages=4)
    return fit(tiles, head_bytes, shared_memory)


def fit(tiles: Tiles, head_bytes: int, shared_memory: int) -> Tiles:
    """Fewer stages, then fewer keys, until queries, keys and values of a program fit its memory."""
    padded = power_of_two(head_bytes)
    reserved = tiles.rows * padded + 1024
    keys, stages = tiles.keys, tiles.num_stages
    while reserved + 2 * keys * padded * stages > shared_memory and (stages > 2 or keys > 16):
        if stages > 2:
            stages -= 1
        else:
            keys //= 2
    return replace(tiles, keys=keys, num_stages=stages)


def plan_splits(
    num_programs: int, num_queries: int, max_context: int, head_bytes: int, sms: int, memory: int
) -> SplitPlan:
    """Enough programs to fill the card, never more to a context than it has tiles.

    ``num_programs`` is rows times key-value heads, ``num_queries`` tokens times heads of a group,
    ``head_bytes`` the size of one key, ``memory`` what a program can share among its threads.
    Either each of the ``sms`` processors gets one program with wide tiles, or two with narrow ones,
    which fills it more evenly; both keep some 64 KiB on the way from memory. Where more programs
    than that queue up, short tiles let them follow each other sooner.

    All of it is known on the host from counts and the longest context: no synchronisation, and a
    graph captured for the longest context is right for all shorter ones, whose rows cut themselves
    into as many, smaller splits.
    """
    wide_splits, narrow_splits = max(1, sms // num_programs), max(1, 2 * sms // num_programs)
    wide_fill = wide_splits * num_programs / sms
    narrow_fill = narrow_splits * num_programs / (2 * sms)
    is_wide = wide_fill <= 1 and wide_fill >= narrow_fill - WIDE_BONUS and num_queries <= 16
    num_splits = wide_splits if is_wide else narrow_splits
    most_keys = 128 if is_wide else 64 if narrow_fill <= 1 else 32
    keys = max(16, min(most_keys, most_keys * 256 // power_of_two(head_bytes)))
    tiles = Tiles(max(16, power_of_two(num_queries)), keys, num_warps=4, num_stages=3)
    tiles = fit(tiles, head_bytes, memory)
    return SplitPlan(min(num_splits, -(-max_context // tiles.keys), MAX_SPLITS), tiles)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """See ``reference.paged_attention``: ``q [T, H, D]`` -> ``[T, H, D]``, contiguous.

    Rows of up to ``SHORT_QUERY`` queries go to ``split_kernel``, longer ones to ``tiled_kernel``;
    each kernel leaves the other's rows alone. The two caches must have equal strides.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    short = max((length for length in meta.query_lens if length <= SHORT_QUERY), default=0)
    window = sliding_window or 0
    if short:
        _attend_short(q, k_cache, v_cache, out, meta, scale, window, short)
    if meta.max_query_len > SHORT_QUERY:
        _attend_long(q, k_cache, v_cache, out, meta, scale, window)
    return out


def _attend_short(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int,
    query_limit: int,
) -> None:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, num_rows = k_cache.shape[2], len(meta.query_lens)
    group = num_heads // num_kv_heads
    context = min(meta.max_seqlen_k, window + query_limit) if window else meta.max_seqlen_k
    num_short = sum(length <= query_limit for length in meta.query_lens)
    plan = plan_splits(
        num_short * num_kv_heads,
        query_limit * group,
        context,
        head_dim * q.element_size(),
        num_sms(q.device),
        shared_memory(q.device),
    )
    tiles, num_splits = plan.tiles, plan.num_splits
    early = starts_early(q.device)
    partial = log_sum = out
    if num_splits > 1:
        shape = (num_rows, query_limit, num_heads, num_splits)
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
        log_sum = torch.empty(shape, dtype=torch.float32, device=q.device)
    split_kernel[num_kv_heads, num_splits, num_rows](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        log_sum,
        meta.cu_seqlens_q,
        meta.seqlens_k,
        meta.block_table,
        meta.block_table.stride(0),
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        scale * math.log2(math.e),
        num_splits,
        query_limit,
        num_heads=num_heads,
        group=group,
        window=window,
        block_size=k_cache.shape[1],
        head_dim=head_dim,
        padded_dim=power_of_two(max(head_dim, 16)),
        tile_rows=tiles.rows,
        tile_keys=tiles.keys,
        is_whole=num_splits == 1,
        early=early,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=early,
    )
    if num_splits > 1:
        reduce_kernel[num_rows * query_limit, num_heads, -(-head_dim // REDUCED_DIMS)](
            partial,
            log_sum,
            out,
            meta.cu_seqlens_q,
            num_splits,
            query_limit,
            num_heads=num_heads,
            head_dim=head_dim,
            tile_dims=REDUCED_DIMS,
            tile_splits=power_of_two(num_splits),
            early=early,
            num_warps=4,
            launch_pdl=early,
        )


def _attend_long(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_rows = k_cache.shape[2], len(meta.query_lens)
    group = num_heads // num_kv_heads
    tiles = long_tiles(head_dim * q.element_size(), group, shared_memory(q.device))
    tiled_kernel[num_kv_heads, num_tokens // (tiles.rows // group) + num_rows](
        q,
        k_cache,
        v_cache,
        out,
        meta.cu_seqlens_q,
        meta.seqlens_k,
        meta.block_table,
        meta.block_table.stride(0),
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        scale * math.log2(math.e),
        SHORT_QUERY,
        num_rows,
        num_heads=num_heads,
        group=group,
        window=window,
        block_size=k_cache.shape[1],
        head_dim=head_dim,
        padded_dim=power_of_two(max(head_dim, 16)),
        tile_rows=tiles.rows,
        tile_keys=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
