"""Attention of long chunks: tiles of queries against tiles of keys on the tensor cores.

FlashAttention (arXiv 2205.14135, 2307.08691) over a block table. The query heads that share a
key-value head are folded into the rows of a tile, so keys are loaded once for all of them.

Where that makes too few tiles for a GPU, the keys of each are split: see ``tile_splits``.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton.launch import (
    num_sms,
    power_of_two,
    shared_memory,
    starts_early,
)
from mini_infer.kernels.triton.paged_tiles import attend_tile, key_alignment, key_blocks, load_tiles
from mini_infer.kernels.triton.tile_splits import (
    count_splits,
    join_splits,
    keys_of_tile,
    last_row_at,
    plan_tiles,
)


@triton.jit(
    do_not_specialize=["table_stride", "query_limit", "num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["cu_seqlens_q"],
)
def tiled_kernel(
    q_ptr,
    k_cache,
    v_cache,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    cu_seqlens_q,
    seqlens_k,
    block_table,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale_log2,
    query_limit,
    num_rows,
    num_tokens,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    window: tl.constexpr,
    block_stride: tl.constexpr,
    token_stride: tl.constexpr,
    head_stride: tl.constexpr,
    block_size: tl.constexpr,
    align: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    is_split: tl.constexpr,
    early: tl.constexpr,
):
    """One tile of one row's queries. Grid: (key-value heads, T // tile_tokens + R, splits).

    A row of length L has cdiv(L, tile_tokens) tiles. ``cu_seqlens_q[r] // tile_tokens + r`` is at
    or behind the end of row r - 1's, so it serves as row r's first tile, and no list of tiles has
    to be made or sent; the few tiles too many find nothing to do.

    Writes ``out [T, H, D]``; or, where ``is_split`` and the tile sees enough keys for several
    splits, ``partial [splits, T, H, D]`` and ``log_sum [splits, T, H]``, both float32 and small
    enough for offsets of 32 bits.
    """
    if is_split and early:
        tl.extra.cuda.gdc_launch_dependents()
    tile_tokens: tl.constexpr = tile_rows // group
    kv_head = tl.program_id(0)
    # The last tiles of a chunk see the most keys: they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = last_row_at(tile, cu_seqlens_q, num_rows, tile_tokens, 1)
    begin = tl.load(cu_seqlens_q + row).to(tl.int32)
    query_len = tl.load(cu_seqlens_q + row + 1).to(tl.int32) - begin
    first_token = (tile - begin // tile_tokens - row) * tile_tokens
    if query_len <= query_limit or first_token >= query_len:
        return  # a short query is split_attention's
    context = tl.load(seqlens_k + row).to(tl.int32)
    first_position = context - query_len + first_token
    start, end = keys_of_tile(first_position, context, tile_tokens, window, align)
    split, count = tl.program_id(2), 1
    if is_split:
        count = count_splits(start, end, tl.num_programs(2), tile_keys)
        if split >= count:
            return
        base, tiles = start, tl.cdiv(end - start, tile_keys)
        start = base + tiles * split // count * tile_keys
        end = tl.minimum(base + tiles * (split + 1) // count * tile_keys, end)
    seen_by_all = start
    if window == 0:
        seen_by_all = (first_position + 1) // tile_keys * tile_keys
        if is_split:
            seen_by_all = tl.minimum(tl.maximum(seen_by_all, start), end)

    rows = tl.arange(0, tile_rows)
    dims = tl.arange(0, padded_dim)
    token = first_token + rows // group
    head = kv_head * group + rows % group
    is_query = (token < query_len) & (rows < tile_tokens * group)
    inside = is_query[:, None] & (dims[None, :] < head_dim)
    query = (begin + token).to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + query[:, None] + dims[None, :], mask=inside, other=0.0)
    position = context - query_len + token

    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    table = block_table + tl.cast(row, tl.int64) * table_stride
    # Loaded a tile ahead, so that the address of a key is known when its load is due.
    blocks = key_blocks(table, start, end, block_size, tile_keys, align)
    acc = tl.zeros([tile_rows, padded_dim], tl.float32)
    row_sum = tl.zeros([tile_rows], tl.float32)
    row_max = tl.full([tile_rows], float("-inf"), tl.float32)
    for first_key in range(start, seen_by_all, tile_keys):
        next_blocks = key_blocks(table, first_key + tile_keys, end, block_size, tile_keys, align)
        k, v = load_tiles(
            k_head,
            v_head,
            blocks,
            block_stride,
            token_stride,
            first_key,
            end,
            block_size,
            align,
            head_dim,
            padded_dim,
            tile_keys,
            False,
        )
        acc, row_sum, row_max = attend_tile(acc, row_sum, row_max, q, k, v, True, scale_log2, False)
        blocks = next_blocks
    for first_key in range(seen_by_all, end, tile_keys):
        next_blocks = key_blocks(table, first_key + tile_keys, end, block_size, tile_keys, align)
        k, v = load_tiles(
            k_head,
            v_head,
            blocks,
            block_stride,
            token_stride,
            first_key,
            end,
            block_size,
            align,
            head_dim,
            padded_dim,
            tile_keys,
            True,
        )
        keys = first_key + tl.arange(0, tile_keys)[None, :]
        visible = (keys < end) & (keys <= position[:, None])
        if window > 0:
            visible &= keys > position[:, None] - window
        acc, row_sum, row_max = attend_tile(
            acc, row_sum, row_max, q, k, v, visible, scale_log2, True
        )
        blocks = next_blocks
    seen = row_sum > 0.0  # not where all keys of the split are newer than the query
    result = acc / tl.where(seen, row_sum, 1.0)[:, None]
    if not is_split or count == 1:
        target = ((begin + token).to(tl.int64) * num_heads + head) * head_dim
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target[:, None] + dims[None, :], out, mask=inside)
    else:
        place = (split * num_tokens + begin + token) * num_heads + head
        log_sum = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
        tl.store(log_sum_ptr + place, log_sum, mask=is_query)
        tl.store(partial_ptr + place[:, None] * head_dim + dims[None, :], result, mask=inside)


def attend_long(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int,
    query_limit: int,
) -> None:
    """Writes ``out [T, H, D]`` of the rows of more than ``query_limit`` queries."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_rows = k_cache.shape[2], len(meta.query_lens)
    group = num_heads // num_kv_heads
    tiles, num_splits = plan_tiles(
        meta.query_lens,
        query_limit,
        num_tokens,
        num_kv_heads,
        group,
        head_dim,
        q.element_size(),
        meta.max_seqlen_k,
        window,
        num_sms(q.device),
        shared_memory(q.device),
    )
    align = key_alignment(k_cache.shape[1], tiles.keys)
    partial = log_sum = None
    if num_splits > 1:
        shape = num_splits, num_tokens, num_heads, head_dim
        partial = torch.empty(shape, dtype=torch.float32, device=q.device)
        log_sum = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    tiled_kernel[num_kv_heads, num_tokens // (tiles.rows // group) + num_rows, num_splits](
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
        scale * math.log2(math.e),
        query_limit,
        num_rows,
        num_tokens,
        num_heads=num_heads,
        group=group,
        window=window,
        block_stride=k_cache.stride(0),
        token_stride=k_cache.stride(1),
        head_stride=k_cache.stride(2),
        block_size=k_cache.shape[1],
        align=align,
        head_dim=head_dim,
        padded_dim=power_of_two(max(head_dim, 16)),
        tile_rows=tiles.rows,
        tile_keys=tiles.keys,
        is_split=partial is not None,
        early=starts_early(q.device),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
    if partial is not None and log_sum is not None:
        join_splits(
            partial, log_sum, out, meta, query_limit, window, align, tiles.rows // group, tiles.keys
        )
