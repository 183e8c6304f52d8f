"""How the contexts of short queries are cut into pieces of equal work, by the programs themselves.

The host knows neither the contexts of a step that a CUDA graph replays, nor may it wait for them.
So a launch fixes only how many pieces there should be (``aim``) per key-value head, and every
program adds up the contexts: a row gets as many pieces as its share of all keys, rounded, but at
least one. Pieces are numbered row by row, so a long row beside many short ones is spread over as
many processors as its keys deserve (the balance of LeanAttention, arXiv 2405.10480, without pieces
that span rows).

Throughout, a row has 1 to ``query_limit`` queries, at the end of its context; rows with more are
another kernel's, and have no piece. Where ``query_limit`` is the constant 1, every row has one.
"""

import triton
import triton.language as tl

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
    if single and num_rows == 1:  # a lone request is in the greatest hurry
        context = tl.load(seqlens_k).to(tl.int32)
        share = tl.maximum(tl.cdiv(seen_keys(context, 1, window), aim), least_keys)
        pieces = count_pieces(context, 1, 1, share, window)
        return num_rows - 1, piece, tl.where(piece < pieces, pieces, 0)
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
