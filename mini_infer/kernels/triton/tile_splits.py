"""How the keys of a tile of queries are split among several programs, and their results joined.

A few dozen queries behind a cached prompt are too few tiles for a GPU, and each would go through
all cached keys alone. What its splits find is weighed by their softmax sums, as in
``split_attention``. There, contexts are cut in proportion to all keys of the step; here each tile's
keys are cut by themselves, so that both kernels know the bounds without a list of pieces.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton.launch import power_of_two, starts_early
from mini_infer.kernels.triton.tiles import Tiles, fit

LEAST_TILES = tl.constexpr(2)
"""Key tiles of a split, at least: fewer cost more to weigh than to attend."""
MOST_PROGRAMS = 4
"""Programs for each processor, at most, where tiles are split: idle ones are among them."""
JOINED_SPLITS = 8
WIDE_TILE_MEMORY = 96 * 1024
"""Bytes of a program. Cards with less (Turing) pass a tile's sums through them, too, in float32."""


@triton.jit
def last_row_at(place, cu_seqlens_q, num_rows, tokens: tl.constexpr, step: tl.constexpr):
    """The last row r of which ``cu_seqlens_q[r] // tokens + r * step`` is at most ``place``."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle).to(tl.int32) // tokens + middle * step <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def keys_of_tile(
    first_position, context, tile_tokens: tl.constexpr, window: tl.constexpr, align: tl.constexpr
):
    """First key and end of what a tile sees whose first query stands at ``first_position``."""
    end = tl.minimum(first_position + tile_tokens, context)
    start = 0
    if window > 0:
        start = tl.maximum(first_position - window + 1, 0) // align * align
    return start, end


@triton.jit
def count_splits(start, end, num_splits, tile_keys: tl.constexpr):
    """Splits among which a tile's keys are divided, of ``num_splits`` that were launched.

    A graph is captured for the longest context: in shorter ones, splits are left without keys.
    """
    return tl.maximum(tl.minimum(tl.cdiv(end - start, tile_keys) // LEAST_TILES, num_splits), 1)


@triton.jit(
    do_not_specialize=["query_limit", "num_rows", "num_splits"],
    do_not_specialize_on_alignment=["cu_seqlens_q"],
)
def join_splits_kernel(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    cu_seqlens_q,
    seqlens_k,
    query_limit,
    num_rows,
    num_splits,
    num_heads: tl.constexpr,
    window: tl.constexpr,
    align: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_splits: tl.constexpr,
    early: tl.constexpr,
):
    """Weighs what the splits of a token's tile found for one head, if it has several.

    Grid: (T, H). Tokens that are ``split_attention``'s are left alone.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    token, head = tl.program_id(0), tl.program_id(1)
    row = last_row_at(token, cu_seqlens_q, num_rows, 1, 0)
    begin = tl.load(cu_seqlens_q + row).to(tl.int32)
    query_len = tl.load(cu_seqlens_q + row + 1).to(tl.int32) - begin
    context = tl.load(seqlens_k + row).to(tl.int32)
    first_token = (token - begin) // tile_tokens * tile_tokens
    first_position = context - query_len + first_token
    start, end = keys_of_tile(first_position, context, tile_tokens, window, align)
    count = count_splits(start, end, num_splits, tile_keys)
    if early:
        tl.extra.cuda.gdc_wait()
    if query_len <= query_limit or token - begin >= query_len or count == 1:
        return

    dims = tl.arange(0, padded_dim)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([padded_dim], tl.float32)
    for first in range(0, count, tile_splits):
        split = first + tl.arange(0, tile_splits)
        exists = split < count
        source = (split * tl.num_programs(0) + token) * num_heads + head
        place = source[:, None] * head_dim + dims[None, :]
        inside = exists[:, None] & (dims[None, :] < head_dim)
        log_sum = tl.load(log_sum_ptr + source, mask=exists, other=float("-inf"))
        partial = tl.load(partial_ptr + place, mask=inside, other=0.0)
        new_highest = tl.maximum(highest, tl.max(log_sum, 0))
        # In a window, late queries see nothing of the first keys.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink, weight = tl.exp2(highest - base), tl.exp2(log_sum - base)
        acc = acc * shrink + tl.sum(partial * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        highest = new_highest
    target = out_ptr + (tl.cast(token, tl.int64) * num_heads + head) * head_dim + dims
    tl.store(target, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < head_dim)


@functools.lru_cache(maxsize=64)
def plan_tiles(
    query_lens: tuple[int, ...],
    query_limit: int,
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    itemsize: int,
    max_keys: int,
    window: int,
    sms: int,
    memory: int,
) -> tuple[Tiles, int]:
    """Tiles of ``tiled_kernel``, and among how many splits the keys of each are divided.

    From counts and the most keys that a row may have; the layers of a step ask the same. The tiles
    are the fastest of those tried on an H200, or what fits the ``memory`` of a program. Where the
    ``sms`` processors have more than two programs each, two of them take turns on one: one
    multiplies while the other has its softmax. That is worth a few spilled registers.
    """
    chunks = [length for length in query_lens if length > query_limit]
    head_bytes = head_dim * itemsize
    is_narrow = max(chunks) * group <= 64 or (memory < WIDE_TILE_MEMORY and head_bytes > 128)
    # Float32 has no tensor cores, and for Triton cards of 64 KiB (Turing) have none at all. With
    # larger tiles of long heads, registers spill, and what is unrolled takes minutes to compile.
    is_slow = head_bytes > 512 or (memory < WIDE_TILE_MEMORY and head_bytes > 256)
    rows = max(32 if is_slow else 64 if is_narrow else 128, power_of_two(group))
    num_warps, tile_tokens = 8 if rows >= 128 else 4, rows // group
    programs = num_kv_heads * sum(triton.cdiv(length, tile_tokens) for length in chunks)
    if is_slow:
        tiles = Tiles(rows, 16, 8, num_stages=2)
    elif head_bytes > 256:
        tiles = Tiles(rows, 32, num_warps, num_stages=4)
    elif programs > 2 * sms:
        tiles = Tiles(rows, 64, num_warps, num_stages=2, max_registers=128)
    else:
        tiles = Tiles(rows, 64, num_warps, num_stages=3)
    tiles = fit(tiles, head_bytes, memory)

    seen = min(max_keys, window + tile_tokens - 1) if window else max_keys
    # Splits multiply the tiles that no row has, too. To limit them also limits what splits leave to
    # be weighed: on an H200, to 35 MB of heads of 128.
    launched = num_kv_heads * (num_tokens // tile_tokens + len(query_lens))
    num_splits = min(
        sms // programs,
        seen // (LEAST_TILES.value * tiles.keys),
        MOST_PROGRAMS * sms // launched,
    )
    return tiles, max(num_splits, 1)


def join_splits(
    partial: Tensor,
    log_sum: Tensor,
    out: Tensor,
    meta: AttentionMetadata,
    query_limit: int,
    window: int,
    align: int,
    tile_tokens: int,
    tile_keys: int,
) -> None:
    """Writes ``out [T, H, D]`` of the tiles that have several splits.

    ``partial [splits, T, H, D]`` and ``log_sum [splits, T, H]`` are what ``tiled_kernel`` left.
    """
    num_splits, num_tokens, num_heads, head_dim = partial.shape
    early = starts_early(out.device)
    join_splits_kernel[num_tokens, num_heads](
        partial,
        log_sum,
        out,
        meta.cu_seqlens_q,
        meta.seqlens_k,
        query_limit,
        len(meta.query_lens),
        num_splits,
        num_heads=num_heads,
        window=window,
        align=align,
        head_dim=head_dim,
        padded_dim=power_of_two(max(head_dim, 16)),
        tile_tokens=tile_tokens,
        tile_keys=tile_keys,
        tile_splits=JOINED_SPLITS,
        early=early,
        num_warps=1,
        launch_pdl=early,
    )
