"""Attention of a step of a token and equally many drafts a row, from the packed projection on.

As ``flash_decoding``, for more than one query a row: the kernel that attends to a piece of a
context also rotates the new queries and keys, and stores the new keys and values, to which the last
piece of a row attends from registers. So a layer has as many kernels as in a step of one query.
"""

import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.kernels.triton.flash_decoding import launch_in_pieces
from mini_infer.kernels.triton.launch import power_of_two
from mini_infer.kernels.triton.paged_tiles import (
    attend_tile,
    key_blocks,
    known_blocks,
    load_tiles,
)
from mini_infer.kernels.triton.pieces import PIECE_FIELDS
from mini_infer.kernels.triton.rotary import (
    inverse_rms,
    load_angles,
    rotate,
    scale_head,
    swapped_dims,
)

MOST_QUERIES = 9
"""Of a row: a token and eight drafts."""
FEW_TOKENS = 32
"""Of a step. Up to here it is mostly latency, of which a kernel less saves some."""
MOST_VALUES = {16: 4096, 32: 4096, 64: 4096, 128: 2048}
"""Of the queries of a tile, by padded size of a head: to rotate more takes too many registers."""
NEW_KEYS = tl.constexpr(16)
"""The least that tensor cores take."""


def takes_drafts(meta: AttentionMetadata, group: int, head_dim: int, norms: bool) -> bool:
    """Has each row equally many queries, more than one, and is all of it little enough?"""
    width = meta.max_query_len
    if not 1 < width <= MOST_QUERIES or width * len(meta.query_lens) > FEW_TOKENS:
        return False
    padded = power_of_two(max(head_dim, 16))
    values = max(16, power_of_two(width * group)) * padded
    fits = values <= MOST_VALUES.get(padded, 0) and not (norms and padded > 64)
    return fits and all(length == width for length in meta.query_lens)


@triton.jit
def load_heads(source, dims, other, inside):
    """Heads ``[rows, padded_dim]`` from the projection, and with their halves exchanged."""
    x = tl.load(source + dims, mask=inside, other=0.0)
    return x, tl.load(source + other, mask=inside, other=0.0)


@triton.jit
def turned(
    x, swapped, dims, other, weight_ptr, cos, sin, eps, norms: tl.constexpr, head_dim: tl.constexpr
):
    """Heads as ``load_heads`` gives them, normalised and rotated."""
    if norms:
        is_dim = dims < head_dim
        scale = inverse_rms(x, 1, eps, head_dim)[:, None]
        x = scale_head(x, scale, tl.load(weight_ptr + dims, mask=is_dim, other=0.0))
        weight = tl.load(weight_ptr + other, mask=is_dim, other=0.0)
        swapped = scale_head(swapped, scale, weight)
    return rotate(x, swapped, cos, sin)


@triton.jit(do_not_specialize=["is_first", "table_stride"])
def draft_attention_kernel(
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
    width: tl.constexpr,
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
    """One piece of one row's context, for the query heads of one key-value head and all queries.

    Grid: (key-value heads, pieces). Pieces cover the new tokens, too; here they end before these,
    which are the last piece's. Writes ``out [R * width, H, D]`` where a row has one piece, else
    ``partial [pieces, width, H, D]`` and ``log_sum [pieces, width, H]``, both float32.

    Old keys need no wait, see ``flash_decoding.decode_kernel``.
    """
    kv_head, piece = tl.program_id(0), tl.program_id(1)
    if early:
        if is_first:  # piece_kernel comes right before
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    fields = pieces + piece * PIECE_FIELDS
    row, index, count = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    start, end, context = tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5)
    begin = tl.load(fields + 7)
    if count == 0:
        return  # others wait
    cached = context - width
    end = tl.minimum(end, cached)
    is_last = index == count - 1
    group: tl.constexpr = num_heads // num_kv_heads
    rows = tl.arange(0, tile_rows)
    token, head = rows // group, kv_head * group + rows % group
    is_query = token < width
    position = cached + token
    dims = tl.arange(0, padded_dim)[None, :]
    other = swapped_dims(dims, head_dim)
    is_dim = dims < head_dim
    inside = is_query[:, None] & is_dim
    new = tl.arange(0, NEW_KEYS)
    is_new = (new < width)[:, None] & is_dim
    table = block_table + row.to(tl.int64) * table_stride
    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    slot = tl.load(slot_mapping + begin + new, mask=new < width, other=0).to(tl.int64)
    place = slot // block_size * block_stride + slot % block_size * token_stride
    if align > 1:
        blocks = known_blocks(fields + 8, tile_keys, align)
    else:
        blocks = key_blocks(table, start, end, block_size, tile_keys, align)

    q = tl.zeros([tile_rows, padded_dim], qkv_ptr.dtype.element_ty)
    acc = tl.zeros([tile_rows, padded_dim], tl.float32)
    row_sum = tl.zeros([tile_rows], tl.float32)
    row_max = tl.full([tile_rows], float("-inf"), tl.float32)
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
            cos, sin = load_angles(
                rope_table, tl.where(is_query, position, 0)[:, None], dims, head_dim
            )
            new_cos, new_sin = load_angles(
                rope_table, tl.where(new < width, cached + new, 0)[:, None], dims, head_dim
            )
            if early:
                tl.extra.cuda.gdc_wait()
            tokens = qkv_ptr + begin.to(tl.int64) * qkv_stride
            source = tokens + (token * qkv_stride + head * head_dim)[:, None]
            key = tokens + (new * qkv_stride)[:, None] + (num_heads + kv_head) * head_dim
            # All before any is used: a piece that is not the last has no use for some of them.
            x, swapped = load_heads(source, dims, other, inside)
            key_x, swapped_key = load_heads(key, dims, other, is_new & is_last)
            new_v = tl.load(key + num_kv_heads * head_dim + dims, mask=is_new & is_last, other=0.0)
            q = turned(x, swapped, dims, other, q_norm_ptr, cos, sin, eps, norms, head_dim)
            if is_last:
                new_k = turned(
                    key_x,
                    swapped_key,
                    dims,
                    other,
                    k_norm_ptr,
                    new_cos,
                    new_sin,
                    eps,
                    norms,
                    head_dim,
                )
                tl.store(k_head + place[:, None] + dims, new_k, mask=is_new)
                tl.store(v_head + place[:, None] + dims, new_v, mask=is_new)
                sees = (new[None, :] <= token[:, None]) & (new < width)[None, :]
                if window > 0:
                    sees &= new[None, :] > token[:, None] - window
                acc, row_sum, row_max = attend_tile(
                    acc, row_sum, row_max, q, new_k, new_v, sees, scale_log2, True
                )
        keys = first_key + tl.arange(0, tile_keys)[None, :]
        visible = (keys < end) & is_query[:, None]
        if window > 0:
            visible &= keys > position[:, None] - window
        acc, row_sum, row_max = attend_tile(
            acc, row_sum, row_max, q, k, v, visible, scale_log2, True
        )
        blocks = next_blocks

    seen = row_sum > 0.0  # not where a window leaves a query none of the piece's keys
    result = acc * (1.0 / tl.where(seen, row_sum, 1.0))[:, None]
    if count == 1:
        target = ((begin + token).to(tl.int64) * num_heads + head) * head_dim
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target[:, None] + dims, out, mask=inside)
    else:
        of_piece = (piece * width + token) * num_heads + head
        log_sum = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
        tl.store(log_sum_ptr + of_piece, log_sum, mask=is_query)
        partial = partial_ptr + of_piece.to(tl.int64)[:, None] * head_dim
        tl.store(partial + dims, result, mask=inside)


def draft_attention(
    qkv: Tensor,
    rope: Rope,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """See ``reference.attend``, for steps that ``takes_drafts`` takes, of consecutive positions up
    to each row's last; and ``flash_decoding.decode_attention`` for what is asked of arguments."""
    arguments = qkv, rope, k_cache, v_cache, meta, scale, sliding_window, qk_norm
    return launch_in_pieces(draft_attention_kernel, *arguments, width=meta.max_query_len)
