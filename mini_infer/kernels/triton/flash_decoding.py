"""A decode step's attention, from the packed projection to the output, for one query a row.

Flash Decoding (Dao et al. 2023): contexts are cut into pieces that are attended independently, and
a second kernel weighs their results by their softmax sums. Here the first kernel also rotates the
new query and key and stores the new key and value, which it attends to from registers, and both
kernels start beside their predecessors (programmatic dependent launch): everything that earlier
steps wrote, up to the first old keys and values, is on its way before they wait.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.kernels.triton.launch import (
    num_sms,
    power_of_two,
    shared_memory,
    starts_early,
)
from mini_infer.kernels.triton.paged_tiles import (
    attend_tile,
    key_alignment,
    key_blocks,
    known_blocks,
    load_tiles,
)
from mini_infer.kernels.triton.pieces import PIECE_FIELDS, seen_keys
from mini_infer.kernels.triton.rotary import (
    inverse_rms,
    load_angles,
    rotate,
    scale_head,
    swapped_dims,
)
from mini_infer.kernels.triton.split_attention import (
    cut_contexts,
    join_pieces,
    new_pieces,
    plan_splits,
)


@triton.jit
def begin_softmax(
    token,
    q_norm_ptr,
    k_norm_ptr,
    cos,
    sin,
    kv_head,
    new_key,
    new_value,
    is_last,
    scale_log2,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    norms: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Reads a row's projection, stores its new key and value, and attends to them.

    Returns ``q [tile_rows, padded_dim]``, normalised and rotated, and the softmax so far, see
    ``attend_tile``: the new key, which only the last piece of a row has, is where it begins.
    """
    group: tl.constexpr = num_heads // num_kv_heads
    rows = tl.arange(0, tile_rows)
    dims = tl.arange(0, padded_dim)
    other = swapped_dims(dims, head_dim)
    is_dim = dims < head_dim
    inside = (rows < group)[:, None] & is_dim[None, :]
    source = token + (kv_head * group + rows)[:, None] * head_dim
    key = token + (num_heads + kv_head) * head_dim
    value = key + num_kv_heads * head_dim
    q = tl.load(source + dims[None, :], mask=inside, other=0.0)
    swapped = tl.load(source + other[None, :], mask=inside, other=0.0)
    k = tl.load(key + dims, mask=is_dim, other=0.0)
    swapped_k = tl.load(key + other, mask=is_dim, other=0.0)
    v = tl.load(value + dims, mask=is_dim, other=0.0)
    if norms:
        q_weight = tl.load(q_norm_ptr + dims, mask=is_dim, other=0.0)
        q_weight_swapped = tl.load(q_norm_ptr + other, mask=is_dim, other=0.0)
        k_weight = tl.load(k_norm_ptr + dims, mask=is_dim, other=0.0)
        k_weight_swapped = tl.load(k_norm_ptr + other, mask=is_dim, other=0.0)
        q_scale = inverse_rms(q, 1, eps, head_dim)[:, None]
        q = scale_head(q, q_scale, q_weight[None, :])
        swapped = scale_head(swapped, q_scale, q_weight_swapped[None, :])
        k_scale = inverse_rms(k, 0, eps, head_dim)
        k = scale_head(k, k_scale, k_weight)
        swapped_k = scale_head(swapped_k, k_scale, k_weight_swapped)
    q = rotate(q, swapped, cos[None, :], sin[None, :])
    k = rotate(k, swapped_k, cos, sin)
    tl.store(new_key + dims, k, mask=is_dim & is_last)
    tl.store(new_value + dims, v, mask=is_dim & is_last)

    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale_log2
    row_max = tl.where(is_last, score, float("-inf"))
    row_sum = tl.zeros([tile_rows], tl.float32) + tl.where(is_last, 1.0, 0.0)
    acc = tl.zeros([tile_rows, padded_dim], tl.float32)
    acc += tl.where(is_last, v.to(tl.float32), 0.0)[None, :]
    return q, acc, row_sum, row_max


@triton.jit(do_not_specialize=["is_first", "table_stride"])
def decode_kernel(
    qkv_ptr,
    rope_table,
    q_norm_ptr,
    k_norm_ptr,
    k_cache,
    v_cache,
    slot_mapping,
    pieces,
    block_table,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    is_first,
    table_stride,
    qkv_stride,
    scale_log2,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    norms: tl.constexpr,
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
    early: tl.constexpr,
):
    """One piece of one row's context, for the query heads of one key-value head.

    Grid: (key-value heads, pieces): programs that run side by side read neighbouring memory. The
    last piece of a row owns its new token, which is not in the cache yet. Writes ``out [R, H, D]``
    where a piece is the only one of its row, else ``partial [pieces, H, D]`` and ``log_sum
    [pieces, H]``, both float32.

    Old keys need no wait. It stands within the loop, so that the pipeline that the compiler makes
    of the loop has asked for the first tiles before it.
    """
    kv_head, piece = tl.program_id(0), tl.program_id(1)
    if early:
        if is_first:  # piece_kernel comes right before
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    fields = pieces + piece * PIECE_FIELDS
    row, index, count = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    start, end, context = tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5)
    if count == 0:
        return  # others wait
    slot = tl.load(slot_mapping + row).to(tl.int64)
    is_last = index == count - 1
    lowest = context - seen_keys(context, 1, window)
    table = block_table + row.to(tl.int64) * table_stride
    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    dims = tl.arange(0, padded_dim)
    cos, sin = load_angles(rope_table, context - 1, dims, head_dim)
    # Loaded a tile ahead, so that the address of a key is known when its load is due.
    if align > 1:
        blocks = known_blocks(fields + 8, tile_keys, align)
    else:
        blocks = key_blocks(table, start, end, block_size, tile_keys, align)

    q = tl.zeros([tile_rows, padded_dim], qkv_ptr.dtype.element_ty)
    acc = tl.zeros([tile_rows, padded_dim], tl.float32)
    row_sum = tl.zeros([tile_rows], tl.float32)
    row_max = tl.zeros([tile_rows], tl.float32)
    for first_key in range(start, tl.maximum(end, start + 1), tile_keys):
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
        if first_key == start:
            if early:
                tl.extra.cuda.gdc_wait()
            place = slot // block_size * block_stride + slot % block_size * token_stride
            q, acc, row_sum, row_max = begin_softmax(
                qkv_ptr + row.to(tl.int64) * qkv_stride,
                q_norm_ptr,
                k_norm_ptr,
                cos,
                sin,
                kv_head,
                k_head + place,
                v_head + place,
                is_last,
                scale_log2,
                eps,
                num_heads,
                num_kv_heads,
                norms,
                head_dim,
                padded_dim,
                tile_rows,
            )
        keys = first_key + tl.arange(0, tile_keys)[None, :]
        visible = (keys >= lowest) & (keys < end)
        acc, row_sum, row_max = attend_tile(
            acc, row_sum, row_max, q, k, v, visible, scale_log2, True
        )
        blocks = next_blocks

    group: tl.constexpr = num_heads // num_kv_heads
    rows = tl.arange(0, tile_rows)
    head = kv_head * group + rows
    is_query = rows < group
    inside = is_query[:, None] & (dims < head_dim)[None, :]
    result = acc * (1.0 / row_sum)[:, None]
    if count == 1:
        target = out_ptr + (row.to(tl.int64) * num_heads + head[:, None]) * head_dim
        tl.store(target + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        place_in_piece = piece * num_heads + head
        tl.store(log_sum_ptr + place_in_piece, row_max + tl.log2(row_sum), mask=is_query)
        partial = partial_ptr + place_in_piece[:, None] * head_dim
        tl.store(partial + dims[None, :], result, mask=inside)


def decode_attention(
    qkv: Tensor,
    rope: Rope,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """See ``reference.attend``, for steps of one query a row: ``qkv [R, H + 2 Hkv, D]``.

    Returns ``[R, H * D]``. ``qkv`` is contiguous within a row and has the dtype of the caches,
    which are laid out alike. Every row owns its slot, except that padded rows
    (context 1) may share one. What ``meta`` and ``rope`` hold must have been written before the
    first kernel of the step that starts early.
    """
    return launch_in_pieces(
        decode_kernel, qkv, rope, k_cache, v_cache, meta, scale, sliding_window, qk_norm
    )


def launch_in_pieces(
    kernel: Any,
    qkv: Tensor,
    rope: Rope,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    qk_norm: tuple[Tensor, Tensor, float] | None,
    **of_kernel: int,
) -> Tensor:
    """``decode_attention`` by a kernel that takes ``decode_kernel``'s arguments, and ``of_kernel``
    beside them, for steps of ``meta.max_query_len`` queries a row."""
    total_heads, head_dim = qkv.shape[1:]
    num_kv_heads, device = k_cache.shape[2], qkv.device
    num_heads = total_heads - 2 * num_kv_heads
    width, window, longest = meta.max_query_len, sliding_window or 0, meta.max_seqlen_k
    early, block_size = starts_early(device), k_cache.shape[1]
    plan = plan_splits(
        len(meta.query_lens),
        num_kv_heads,
        width * (num_heads // num_kv_heads),
        min(longest, window + width - 1) if window else longest,
        head_dim * k_cache.element_size(),
        num_sms(device),
        shared_memory(device),
    )
    is_first, pieces, rows = cut_contexts(meta, plan, window, width, block_size, single=width == 1)
    q_norm, k_norm, eps = qk_norm or (qkv, qkv, 0.0)
    out = torch.empty(len(qkv), num_heads * head_dim, dtype=qkv.dtype, device=device)
    partial, log_sum = new_pieces(plan, width * num_heads, head_dim, device)
    kernel[num_kv_heads, plan.num_pieces](
        qkv,
        rope.table,
        q_norm,
        k_norm,
        k_cache,
        v_cache,
        meta.slot_mapping,
        pieces,
        meta.block_table,
        out,
        partial,
        log_sum,
        int(is_first),
        meta.block_table.stride(0),
        qkv.stride(0),
        scale * math.log2(math.e),
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        norms=qk_norm is not None,
        window=window,
        block_stride=k_cache.stride(0),
        token_stride=k_cache.stride(1),
        head_stride=k_cache.stride(2),
        block_size=block_size,
        align=key_alignment(block_size, plan.tiles.keys),
        head_dim=head_dim,
        padded_dim=power_of_two(max(head_dim, 16)),
        tile_rows=plan.tiles.rows,
        tile_keys=plan.tiles.keys,
        early=early,
        num_warps=plan.tiles.num_warps,
        num_stages=plan.tiles.num_stages,
        launch_pdl=early,
        **of_kernel,
    )
    join_pieces(partial, log_sum, out, pieces, rows, plan, width)
    return out
