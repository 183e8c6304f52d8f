"""How the contexts of short queries are cut into pieces of equal work, once a step, on the device.

The host knows neither the contexts of a step that a CUDA graph replays, nor may it wait for them.
So a launch fixes only how many pieces there should be (``aim``) per key-value head, and
``piece_kernel`` adds up the contexts: a row gets as many pieces as its share of all keys, rounded,
but at least one. All layers read what it found.

Pieces are numbered row by row, so a long row beside many short ones is spread over as many
processors as its keys deserve (the balance of LeanAttention, arXiv 2405.10480, without pieces that
span rows).

Throughout, a row has 1 to ``query_limit`` queries, at the end of its context; rows with more are
another kernel's, and have no piece. Where ``single``, every row has one query.
"""

import triton
import triton.language as tl

from mini_infer.kernels.triton.paged_tiles import MOST_LOOKUPS

SCANNED_ROWS = tl.constexpr(256)


@triton.jit
def query_lengths(cu_seqlens_q, rows, exists, single: tl.constexpr):
    """Queries of ``rows``: nought where none ``exists``."""
    if single:
        return exists.to(tl.int32)
    begin = tl.load(cu_seqlens_q + rows, mask=exists, other=0)
    return (tl.load(cu_seqlens_q + rows + 1, mask=exists, other=0) - begin).to(tl.int32)


@triton.jit
def seen_keys(context, query_len, window: tl.constexpr):
    """Keys that any of a row's queries sees, its own among them."""
    return tl.minimum(context, window + query_len - 1) if window > 0 else context


@triton.jit
def count_pieces(context, query_len, query_limit, share, window: tl.constexpr):
    """Number of pieces of a row, given the keys of an average piece."""
    pieces = (seen_keys(context, query_len, window) + share // 2) // share
    return tl.where((query_len > 0) & (query_len <= query_limit), tl.maximum(pieces, 1), 0)


@triton.jit
def piece_bounds(lowest, cached, index, count, align: tl.constexpr):
    """First key and end of a row's piece, of those from ``lowest`` up to ``cached``.

    Pieces begin at multiples of ``align`` and of 16, so that few share a block; the first one may
    begin below ``lowest``.
    """
    unit: tl.constexpr = align if align > 16 else 16
    count = tl.maximum(count, 1)  # Triton 3.7 does not compile a division by what began as 0
    base = lowest // unit * unit
    units = tl.cdiv(cached - base, unit)
    start = base + units * index // count * unit
    end = base + units * (index + 1) // count * unit
    return start, tl.minimum(end, cached)


@triton.jit
def average_keys(
    seqlens_k,
    cu_seqlens_q,
    num_rows,
    query_limit,
    aim,
    window: tl.constexpr,
    least_keys: tl.constexpr,
    single: tl.constexpr,
):
    """Keys of an average piece, over all rows."""
    total = 0
    for first in range(0, num_rows, SCANNED_ROWS):
        rows = first + tl.arange(0, SCANNED_ROWS)
        exists = rows < num_rows
        context = tl.load(seqlens_k + rows, mask=exists, other=0).to(tl.int32)
        query_len = query_lengths(cu_seqlens_q, rows, exists, single)
        counts = exists & (query_len <= query_limit)
        total += tl.sum(tl.where(counts, seen_keys(context, query_len, window), 0), 0)
    return tl.maximum(tl.cdiv(total, aim), least_keys)


@triton.jit
def find_piece(
    seqlens_k,
    cu_seqlens_q,
    num_rows,
    query_limit,
    piece,
    aim,
    window: tl.constexpr,
    least_keys: tl.constexpr,
    single: tl.constexpr,
):
    """Row of a piece, the piece's index in it, and the number of the row's pieces.

    That number is 0 where there are fewer pieces in all.
    """
    share = average_keys(
        seqlens_k, cu_seqlens_q, num_rows, query_limit, aim, window, least_keys, single
    )
    row, index, count, before = 0, 0, 0, 0
    for first in range(0, num_rows, SCANNED_ROWS):
        rows = first + tl.arange(0, SCANNED_ROWS)
        exists = rows < num_rows
        context = tl.load(seqlens_k + rows, mask=exists, other=0).to(tl.int32)
        query_len = query_lengths(cu_seqlens_q, rows, exists, single)
        pieces = count_pieces(context, query_len, query_limit, share, window)
        end = before + tl.cumsum(pieces, 0)
        found = (end > piece) & (end - pieces <= piece)
        row += tl.sum(tl.where(found, rows, 0), 0)
        index += tl.sum(tl.where(found, piece - end + pieces, 0), 0)
        count += tl.sum(tl.where(found, pieces, 0), 0)
        before += tl.sum(pieces, 0)
    return row, index, count


@triton.jit
def find_row(
    seqlens_k,
    cu_seqlens_q,
    num_rows,
    query_limit,
    row,
    aim,
    window: tl.constexpr,
    least_keys: tl.constexpr,
    single: tl.constexpr,
):
    """A row's first piece, and the number of its pieces."""
    share = average_keys(
        seqlens_k, cu_seqlens_q, num_rows, query_limit, aim, window, least_keys, single
    )
    first_piece, count = 0, 0
    for first in range(0, row + 1, SCANNED_ROWS):
        rows = first + tl.arange(0, SCANNED_ROWS)
        exists = rows <= row
        context = tl.load(seqlens_k + rows, mask=exists, other=0).to(tl.int32)
        query_len = query_lengths(cu_seqlens_q, rows, exists, single)
        pieces = count_pieces(context, query_len, query_limit, share, window)
        first_piece += tl.sum(tl.where(rows < row, pieces, 0), 0)
        count += tl.sum(tl.where(rows == row, pieces, 0), 0)
    return first_piece, count


PIECE_FIELDS = tl.constexpr(16)
"""Row, index in the row, number of the row's pieces; first key, end, context; queries of the row,
and the first of them; then the blocks of the piece's first tile."""
ROW_FIELDS = tl.constexpr(2)


@triton.jit(
    do_not_specialize=["num_rows", "query_limit", "aim", "table_stride"],
    do_not_specialize_on_alignment=["cu_seqlens_q"],
)
def piece_kernel(
    pieces,
    rows,
    seqlens_k,
    cu_seqlens_q,
    block_table,
    num_rows,
    query_limit,
    aim,
    table_stride,
    window: tl.constexpr,
    block_size: tl.constexpr,
    align: tl.constexpr,
    least_keys: tl.constexpr,
    single: tl.constexpr,
    early: tl.constexpr,
):
    """Describes each piece ``[pieces, PIECE_FIELDS]`` and row (first piece, count) ``[R, 2]``.

    Grid: (the larger of both numbers). The last key of a lone query is not in the cache yet: where
    ``single``, it belongs to no piece.

    What is read was written before the first kernel of the step that starts early. What is written
    to may be memory that the kernel before this one still reads, so only that waits.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    is_row = program < num_rows
    first_piece, row_count = find_row(
        seqlens_k,
        cu_seqlens_q,
        num_rows,
        query_limit,
        tl.minimum(program, num_rows - 1),
        aim,
        window,
        least_keys,
        single,
    )
    row, index, count = find_piece(
        seqlens_k, cu_seqlens_q, num_rows, query_limit, program, aim, window, least_keys, single
    )
    # Where there are fewer pieces, the rest is as if it were of row 0, but for the count.
    context = tl.load(seqlens_k + row).to(tl.int32)
    begin, query_len = row, 1
    if not single:
        begin = tl.load(cu_seqlens_q + row).to(tl.int32)
        query_len = tl.load(cu_seqlens_q + row + 1).to(tl.int32) - begin
    lowest = context - seen_keys(context, query_len, window)
    cached = context - 1 if single else context
    start, end = piece_bounds(lowest, cached, index, count, align)
    lookup = tl.arange(0, MOST_LOOKUPS)
    key = start + lookup * align
    table = block_table + row.to(tl.int64) * table_stride
    block = tl.load(table + key // block_size, mask=(key < end) & (count > 0), other=0)
    if early:
        tl.extra.cuda.gdc_wait()
    tl.store(rows + program * ROW_FIELDS, first_piece, mask=is_row)
    tl.store(rows + program * ROW_FIELDS + 1, row_count, mask=is_row)
    piece = pieces + program * PIECE_FIELDS
    tl.store(piece, row)
    tl.store(piece + 1, index)
    tl.store(piece + 2, count)
    tl.store(piece + 3, start)
    tl.store(piece + 4, end)
    tl.store(piece + 5, context)
    tl.store(piece + 6, query_len)
    tl.store(piece + 7, begin)
    tl.store(piece + 8 + lookup, block)
