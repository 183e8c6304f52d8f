"""Flash Decoding: short queries over long contexts, the contexts split over the processors.

A decoding request has one query (or 1 + k, with drafts) per head, and all of its keys and values to
read. One program per request and head would leave most of a GPU idle, so contexts are cut into
pieces that are attended independently; a second kernel weighs their results by their softmax sums
(Flash-Decoding, Dao et al. 2023; the weighing is that of arXiv 2205.14135, appendix B).
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton.launch import num_sms, power_of_two, shared_memory, starts_early
from mini_infer.kernels.triton.paged_tiles import attend_tile, key_alignment, key_blocks, load_tiles
from mini_infer.kernels.triton.pieces import PIECE_FIELDS, ROW_FIELDS, piece_kernel
from mini_infer.kernels.triton.tiles import Tiles, fit

LEAST_KEYS = 64
"""Keys of a piece, at least: fewer cost more to weigh than to read."""
MANY_KV_HEADS = 16
"""So many read enough at once, even in a single row, for bandwidth to count and not latency."""
SPLITS = True
"""Whether contexts are cut at all."""
JOINED_DIMS, JOINED_PIECES = 32, 64


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How contexts are cut: what a launch fixes, whatever the contexts turn out to be."""

    aim: int
    """Pieces per key-value head that all rows together should have."""
    num_pieces: int
    """Most pieces per key-value head that there can be."""
    is_whole: bool
    """No row can have several pieces."""
    tiles: Tiles


def plan_splits(
    num_rows: int,
    num_kv_heads: int,
    num_queries: int,
    max_keys: int,
    head_bytes: int,
    sms: int,
    memory: int,
) -> SplitPlan:
    """From counts and the most keys that a row may see.

    ``num_queries`` is tokens of a row times heads of a group, ``head_bytes`` the size of one key,
    ``memory`` what a program can share among its threads. A row has as many pieces as its share of
    all keys of the step, rounded, but one at least: so there are at most ``aim + num_rows - 1``.

    The tiles are the fastest of those tried on an H200. Few rows make a step all latency, and there
    a program has 48 KiB of shared memory at most: for more, Triton asks for another division of a
    processor's memory into cache and shared memory than the kernels before and after have, and none
    of these starts early. Where rows and heads fill the ``sms`` processors twice, small programs do
    best, of which four share a processor; as for few rows of many heads, whose pieces are long.
    """
    units = num_rows * num_kv_heads
    tile_rows = max(16, power_of_two(num_queries))
    if num_kv_heads >= MANY_KV_HEADS and units <= sms // 4 and num_queries <= 16:
        programs, most_keys, num_warps, num_stages = 4 * sms, 32, 2, 3
    elif units <= sms // 4:
        most_keys = 64 if tile_rows * head_bytes <= 8192 else 32  # beside so many queries
        programs, num_warps, num_stages = 2 * sms, 4, 2
    elif num_queries > 16 or units <= sms // 2 or sms < units <= 2 * sms:
        programs, most_keys, num_warps, num_stages = 2 * sms, 64, 4, 3
    elif units <= sms:
        programs, most_keys, num_warps, num_stages = sms, 128, 8, 3
    else:
        programs, most_keys, num_warps, num_stages = 4 * sms, 32, 2, 4
    aim = max(1, programs // num_kv_heads) if SPLITS else 1
    row_limit = max(1, (max_keys + LEAST_KEYS // 2) // LEAST_KEYS)
    keys = max(16, min(most_keys, most_keys * 256 // power_of_two(head_bytes)))
    num_warps = max(num_warps, min(8, tile_rows // 16))  # or else the sums of queries spill
    tiles = Tiles(tile_rows, keys, num_warps, num_stages)
    num_pieces = min(aim + num_rows - 1, num_rows * row_limit)
    return SplitPlan(aim, num_pieces, num_pieces == num_rows, fit(tiles, head_bytes, memory))


@triton.jit(do_not_specialize=["query_limit", "is_first", "table_stride"])
def split_kernel(
    q_ptr,
    k_cache,
    v_cache,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    pieces,
    block_table,
    query_limit,
    is_first,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale_log2,
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
    early: tl.constexpr,
):
    """One piece of one row's context, for the ``group`` query heads of one key-value head.

    Grid: (key-value heads, pieces): programs that run side by side read neighbouring memory. Writes
    ``out [T, H, D]`` where the row has one piece, else ``partial [pieces, query_limit, H, D]`` and
    ``log_sum [pieces, query_limit, H]``, both float32.
    """
    kv_head, piece = tl.program_id(0), tl.program_id(1)
    if early:
        if is_first:  # piece_kernel comes right before
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    fields = pieces + piece * PIECE_FIELDS
    row, count = tl.load(fields), tl.load(fields + 2)
    start, end, context = tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5)
    query_len, begin = tl.load(fields + 6), tl.load(fields + 7)
    if early:  # rotary_and_write_kernel may still be writing queries, keys and values
        tl.extra.cuda.gdc_wait()
    if count == 0:
        return

    rows = tl.arange(0, tile_rows)
    dims = tl.arange(0, padded_dim)
    token = rows // group
    head = kv_head * group + rows % group
    is_query = token < query_len
    inside = is_query[:, None] & (dims[None, :] < head_dim)
    query = (begin + token).to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + query[:, None] + dims[None, :], mask=inside, other=0.0)
    position = context - query_len + token

    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    table = block_table + row.to(tl.int64) * table_stride
    # Loaded a tile ahead, so that the address of a key is known when its load is due.
    blocks = key_blocks(table, start, end, block_size, tile_keys, align)
    acc = tl.zeros([tile_rows, padded_dim], tl.float32)
    row_sum = tl.zeros([tile_rows], tl.float32)
    row_max = tl.full([tile_rows], float("-inf"), tl.float32)
    for first_key in range(start, end, tile_keys):
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
    seen = row_sum > 0.0  # not where all keys of the piece are newer than the query
    result = acc * (1.0 / tl.where(seen, row_sum, 1.0))[:, None]
    if count == 1:
        target = ((begin + token).to(tl.int64) * num_heads + head) * head_dim
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target[:, None] + dims[None, :], out, mask=inside)
    else:
        place = (piece * query_limit + token) * num_heads + head
        log_sum = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
        tl.store(log_sum_ptr + place, log_sum, mask=is_query)
        partial = partial_ptr + place.to(tl.int64)[:, None] * head_dim
        tl.store(partial + dims[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["query_limit"])
def join_kernel(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    pieces,
    rows,
    query_limit,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile_dims: tl.constexpr,
    tile_pieces: tl.constexpr,
    early: tl.constexpr,
):
    """Weighs the pieces of a row, if it has several, by their softmax sums.

    Grid: (R, programs): those of a row share ``tile_dims`` dimensions of its query heads among
    themselves. It is all latency, so a head's pieces are loaded at once.
    """
    if early:  # what piece_kernel found was waited for by the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    row = rows + tl.program_id(0) * ROW_FIELDS
    first_piece, count = tl.load(row), tl.load(row + 1)
    query_len, begin = 0, 0
    if count > 1:
        fields = pieces + first_piece * PIECE_FIELDS
        query_len, begin = tl.load(fields + 6), tl.load(fields + 7)
    if early:
        tl.extra.cuda.gdc_wait()
    parts_of_head: tl.constexpr = (head_dim + tile_dims - 1) // tile_dims
    for part in range(tl.program_id(1), query_len * num_heads * parts_of_head, tl.num_programs(1)):
        head = part // parts_of_head  # of all heads of all queries of the row
        dims = part % parts_of_head * tile_dims + tl.arange(0, tile_dims)
        highest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([tile_dims], tl.float32)
        for first in range(0, count, tile_pieces):
            piece = first + tl.arange(0, tile_pieces)
            exists = piece < count
            source = (first_piece + piece) * query_limit * num_heads + head
            place = source.to(tl.int64)[:, None] * head_dim + dims[None, :]
            inside = exists[:, None] & (dims[None, :] < head_dim)
            log_sum = tl.load(log_sum_ptr + source, mask=exists, other=float("-inf"))
            partial = tl.load(partial_ptr + place, mask=inside, other=0.0)
            new_highest = tl.maximum(highest, tl.max(log_sum, 0))
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            shrink, weight = tl.exp2(highest - base), tl.exp2(log_sum - base)
            acc = acc * shrink + tl.sum(partial * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            highest = new_highest
        target = out_ptr + (tl.cast(begin, tl.int64) * num_heads + head) * head_dim + dims
        tl.store(target, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < head_dim)


def attend_short(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int,
    query_limit: int,
) -> None:
    """Writes ``out [T, H, D]`` of the rows of up to ``query_limit`` queries."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    longest = meta.max_seqlen_k
    plan = plan_splits(
        sum(length <= query_limit for length in meta.query_lens),
        num_kv_heads,
        query_limit * group,
        min(longest, window + query_limit - 1) if window else longest,
        head_dim * q.element_size(),
        num_sms(q.device),
        shared_memory(q.device),
    )
    partial, log_sum = new_pieces(plan, query_limit * num_heads, head_dim, q.device)
    is_first, pieces, rows = cut_contexts(
        meta, plan, window, query_limit, k_cache.shape[1], single=False
    )
    early = starts_early(q.device)
    split_kernel[num_kv_heads, plan.num_pieces](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        log_sum,
        pieces,
        meta.block_table,
        query_limit,
        int(is_first),
        meta.block_table.stride(0),
        q.stride(0),
        q.stride(1),
        scale * math.log2(math.e),
        num_heads=num_heads,
        group=group,
        window=window,
        block_stride=k_cache.stride(0),
        token_stride=k_cache.stride(1),
        head_stride=k_cache.stride(2),
        block_size=k_cache.shape[1],
        align=key_alignment(k_cache.shape[1], plan.tiles.keys),
        head_dim=head_dim,
        padded_dim=power_of_two(max(head_dim, 16)),
        tile_rows=plan.tiles.rows,
        tile_keys=plan.tiles.keys,
        early=early,
        num_warps=plan.tiles.num_warps,
        num_stages=plan.tiles.num_stages,
        launch_pdl=early,
    )
    join_pieces(partial, log_sum, out, pieces, rows, plan, query_limit)


def new_pieces(
    plan: SplitPlan, heads_of_row: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where pieces leave ``partial [pieces, heads, D]`` and ``log_sum [pieces, heads]``."""
    shape = plan.num_pieces, heads_of_row, head_dim
    partial = torch.empty(shape, dtype=torch.float32, device=device)
    return partial, torch.empty(shape[:2], dtype=torch.float32, device=device)


def cut_contexts(
    meta: AttentionMetadata,
    plan: SplitPlan,
    window: int,
    query_limit: int,
    block_size: int,
    *,
    single: bool,
) -> tuple[bool, Tensor, Tensor]:
    """What ``piece_kernel`` finds, of the rows of up to ``query_limit`` queries.

    Where ``single``, each row has one, whose key is not in the cache yet. A step's first layer
    launches the kernel, and the others share the result; a graph that is captured holds its own
    launch. Returns whether it has been launched right now, the pieces and the rows.
    """
    capturing = meta.seqlens_k.is_cuda and torch.cuda.is_current_stream_capturing()
    key = (plan, window, query_limit, block_size, single, capturing)
    if key in meta.pieces:
        return False, *meta.pieces[key]
    num_rows, device = len(meta.query_lens), meta.seqlens_k.device
    programs = max(num_rows, plan.num_pieces)
    align = key_alignment(block_size, plan.tiles.keys)
    pieces = torch.empty(programs, PIECE_FIELDS.value, dtype=torch.int32, device=device)
    rows = torch.empty(num_rows, ROW_FIELDS.value, dtype=torch.int32, device=device)
    early = starts_early(device)
    piece_kernel[programs,](
        pieces,
        rows,
        meta.seqlens_k,
        meta.cu_seqlens_q,
        meta.block_table,
        num_rows,
        query_limit,
        plan.aim,
        meta.block_table.stride(0),
        window=window,
        block_size=block_size,
        align=align,
        least_keys=max(LEAST_KEYS, align),  # so that no piece is left without keys
        single=single,
        early=early,
        launch_pdl=early,
    )
    meta.pieces[key] = pieces, rows
    return True, pieces, rows


def join_pieces(
    partial: Tensor,
    log_sum: Tensor,
    out: Tensor,
    pieces: Tensor,
    rows: Tensor,
    plan: SplitPlan,
    query_limit: int,
) -> None:
    """Writes ``out`` of the rows that have several pieces, if there can be any."""
    if plan.is_whole:
        return
    num_rows, head_dim = len(rows), partial.shape[2]
    parts = partial.shape[1] * triton.cdiv(head_dim, JOINED_DIMS)
    early = starts_early(out.device)
    join_kernel[num_rows, min(parts, triton.cdiv(4 * num_sms(out.device), num_rows))](
        partial,
        log_sum,
        out,
        pieces,
        rows,
        query_limit,
        num_heads=partial.shape[1] // query_limit,
        head_dim=head_dim,
        tile_dims=JOINED_DIMS,
        tile_pieces=JOINED_PIECES,
        early=early,
        num_warps=1,
        launch_pdl=early,
    )
