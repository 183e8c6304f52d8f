"""How a decode step's contexts are cut into pieces of equal work, found by each program itself.

The host knows neither the contexts of a step that a CUDA graph replays, nor may it wait for them.
So a launch fixes only how many pieces there should be (``aim``) per key-value head, and every
program adds up the contexts: a row gets as many pieces as its share of all keys, rounded, but at
least one. Pieces are numbered row by row, so a long row beside many short ones is spread over as
many processors as its keys deserve (the balance of LeanAttention, arXiv 2405.10480, without pieces
that span rows).
"""

import triton
import triton.language as tl

SCANNED_ROWS = tl.constexpr(256)
ALIGNMENT = tl.constexpr(16)
"""Pieces begin at multiples of this many keys, so that few of them share a block."""


@triton.jit
def seen_keys(context, window: tl.constexpr):
    """Keys that a row's query sees, its own among them."""
    return tl.minimum(context, window) if window > 0 else context


@triton.jit
def row_pieces(context, share, window: tl.constexpr):
    """Number of pieces of a row, given the keys of a piece of average size."""
    return tl.maximum((seen_keys(context, window) + share // 2) // share, 1)


@triton.jit
def piece_bounds(context, index, count, window: tl.constexpr):
    """First and end of the cached keys of a row's piece, and the row's lowest visible key.

    The new key, at ``context - 1``, is no cached one. Pieces differ by ``ALIGNMENT`` keys at most,
    but that the first may begin below ``lowest``.
    """
    lowest = context - seen_keys(context, window)
    base = lowest // ALIGNMENT * ALIGNMENT
    units = tl.cdiv(context - 1 - base, ALIGNMENT)
    start = base + units * index // count * ALIGNMENT
    end = base + units * (index + 1) // count * ALIGNMENT
    return start, tl.minimum(end, context - 1), lowest


@triton.jit
def keys_per_piece(seqlens_k, num_rows, aim, window: tl.constexpr, least_keys: tl.constexpr):
    """Keys of an average piece, over all rows."""
    total = 0
    for first in range(0, num_rows, SCANNED_ROWS):
        rows = first + tl.arange(0, SCANNED_ROWS)
        context = tl.load(seqlens_k + rows, mask=rows < num_rows, other=0).to(tl.int32)
        total += tl.sum(seen_keys(context, window), 0)
    return tl.maximum(tl.cdiv(total, aim), least_keys)


@triton.jit
def find_piece(seqlens_k, num_rows, piece, aim, window: tl.constexpr, least_keys: tl.constexpr):
    """Row of a piece, that row's first piece, and ``share``, the keys of an average piece.

    The row is ``num_rows`` or more where there are fewer pieces.
    """
    share = keys_per_piece(seqlens_k, num_rows, aim, window, least_keys)
    row, first_piece, before = 0, 0, 0
    for first in range(0, num_rows, SCANNED_ROWS):
        rows = first + tl.arange(0, SCANNED_ROWS)
        context = tl.load(seqlens_k + rows, mask=rows < num_rows, other=0).to(tl.int32)
        count = tl.where(rows < num_rows, row_pieces(context, share, window), 0)
        passed = (before + tl.cumsum(count, 0) <= piece) & (rows < num_rows)
        row += tl.sum(passed.to(tl.int32), 0)
        first_piece += tl.sum(tl.where(passed, count, 0), 0)
        before += tl.sum(count, 0)
    return row, first_piece, share


@triton.jit
def pieces_before(seqlens_k, num_rows, row, aim, window: tl.constexpr, least_keys: tl.constexpr):
    """A row's first piece, and the number of its pieces."""
    share = keys_per_piece(seqlens_k, num_rows, aim, window, least_keys)
    first_piece = 0
    for first in range(0, row, SCANNED_ROWS):
        rows = first + tl.arange(0, SCANNED_ROWS)
        context = tl.load(seqlens_k + rows, mask=rows < row, other=0).to(tl.int32)
        first_piece += tl.sum(tl.where(rows < row, row_pieces(context, share, window), 0), 0)
    return first_piece, row_pieces(tl.load(seqlens_k + row).to(tl.int32), share, window)
