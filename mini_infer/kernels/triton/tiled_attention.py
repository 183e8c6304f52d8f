"""Attention of long chunks: tiles of queries against tiles of keys on the tensor cores.

FlashAttention (arXiv 2205.14135, 2307.08691) over a block table. The query heads that share a
key-value head are folded into the rows of a tile, so keys are loaded once for all of them.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton.launch import power_of_two, shared_memory
from mini_infer.kernels.triton.paged_tiles import attend_tile, key_alignment, key_blocks, load_tile
from mini_infer.kernels.triton.tiles import Tiles, fit


@triton.jit(do_not_specialize=["table_stride", "query_limit", "num_rows"])
def tiled_kernel(
    q_ptr,
    k_cache,
    v_cache,
    out_ptr,
    cu_seqlens_q,
    seqlens_k,
    block_table,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale_log2,
    query_limit,
    num_rows,
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
):
    """One tile of one row's queries. Grid: (key-value heads, T // tile_tokens + R).

    A row of length L has cdiv(L, tile_tokens) tiles. ``cu_seqlens_q[r] // tile_tokens + r`` is at
    or behind the end of row r - 1's, so it serves as row r's first tile, and no list of tiles has
    to be made or sent; the few tiles too many find nothing to do.
    """
    tile_tokens: tl.constexpr = tile_rows // group
    kv_head = tl.program_id(0)
    # The last tiles of a chunk see the most keys: they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    low, high = 0, num_rows
    while high - low > 1:  # the last row whose first tile is at or before this one
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle).to(tl.int32) // tile_tokens + middle <= tile:
            low = middle
        else:
            high = middle
    begin = tl.load(cu_seqlens_q + low).to(tl.int32)
    query_len = tl.load(cu_seqlens_q + low + 1).to(tl.int32) - begin
    first_token = (tile - begin // tile_tokens - low) * tile_tokens
    if query_len <= query_limit or first_token >= query_len:
        return  # a short query is split_attention's
    context = tl.load(seqlens_k + low).to(tl.int32)

    rows = tl.arange(0, tile_rows)
    dims = tl.arange(0, padded_dim)
    token = first_token + rows // group
    head = kv_head * group + rows % group
    is_query = (token < query_len) & (rows < tile_tokens * group)
    inside = is_query[:, None] & (dims[None, :] < head_dim)
    query = (begin + token).to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + query[:, None] + dims[None, :], mask=inside, other=0.0)
    position = context - query_len + token

    first_position = context - query_len + first_token
    end = tl.minimum(first_position + tile_tokens, context)
    start = 0
    if window > 0:
        start = tl.maximum(first_position - window + 1, 0) // align * align
        seen_by_all = start
    else:
        seen_by_all = (first_position + 1) // tile_keys * tile_keys
    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    table = block_table + tl.cast(low, tl.int64) * table_stride
    # Loaded a tile ahead, so that the address of a key is known when its load is due.
    blocks = key_blocks(table, start, end, block_size, tile_keys, align)
    acc = tl.zeros([tile_rows, padded_dim], tl.float32)
    row_sum = tl.zeros([tile_rows], tl.float32)
    row_max = tl.full([tile_rows], float("-inf"), tl.float32)
    for first_key in range(start, seen_by_all, tile_keys):
        next_blocks = key_blocks(table, first_key + tile_keys, end, block_size, tile_keys, align)
        k = load_tile(
            k_head,
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
        v = load_tile(
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
        k = load_tile(
            k_head,
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
        v = load_tile(
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
    target = ((begin + token).to(tl.int64) * num_heads + head) * head_dim
    out = (acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + target[:, None] + dims[None, :], out, mask=inside)


def long_tiles(head_bytes: int, group: int, shared_memory: int) -> Tiles:
    """Tiles of ``tiled_kernel``: the fastest of those tried on an H200, or what fits.

    Two programs of a processor take turns: one multiplies while the other has its softmax. That is
    worth a few spilled registers.
    """
    rows = max(128 if head_bytes <= 512 else 64, power_of_two(group))
    if head_bytes <= 256:
        tiles = Tiles(rows, 64, num_warps=8, num_stages=2, max_registers=128)
    else:
        tiles = Tiles(rows, 32, num_warps=8 if rows >= 128 else 4, num_stages=4)
    return fit(tiles, head_bytes, shared_memory)


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
        scale * math.log2(math.e),
        query_limit,
        num_rows,
        num_heads=num_heads,
        group=group,
        window=window,
        block_stride=k_cache.stride(0),
        token_stride=k_cache.stride(1),
        head_stride=k_cache.stride(2),
        block_size=k_cache.shape[1],
        align=key_alignment(k_cache.shape[1], tiles.keys),
        head_dim=head_dim,
        padded_dim=power_of_two(max(head_dim, 16)),
        tile_rows=tiles.rows,
        tile_keys=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
