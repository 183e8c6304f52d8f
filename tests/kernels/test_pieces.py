"""How programs find their piece of a decode step's contexts."""

from itertools import pairwise

import pytest
import torch

from tests.kernels.triton_device import DEVICE

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 -- after the test of its presence

from mini_infer.kernels.triton import pieces  # noqa: E402

find_piece, piece_bounds = pieces.find_piece, pieces.piece_bounds
pieces_before, row_pieces = pieces.pieces_before, pieces.row_pieces


@triton.jit
def list_kernel(
    seqlens_k, out, num_rows, aim, stride, window: tl.constexpr, least_keys: tl.constexpr
):
    """Row, first piece, first key and end of every ``stride``-th piece ``[programs, 6]``."""
    piece = tl.program_id(0) * stride
    row, first_piece, share = find_piece(seqlens_k, num_rows, piece, aim, window, least_keys)
    out += tl.program_id(0) * 6
    tl.store(out, row)
    if row < num_rows:
        context = tl.load(seqlens_k + row)
        count = row_pieces(context, share, window)
        start, end, lowest = piece_bounds(context, piece - first_piece, count, window)
        tl.store(out + 1, first_piece)
        tl.store(out + 2, count)
        tl.store(out + 3, start)
        tl.store(out + 4, end)
        tl.store(out + 5, lowest)


@triton.jit
def count_kernel(seqlens_k, out, num_rows, aim, window: tl.constexpr, least_keys: tl.constexpr):
    """First piece and number of pieces of each row ``[R, 2]``."""
    row = tl.program_id(0)
    first_piece, count = pieces_before(seqlens_k, num_rows, row, aim, window, least_keys)
    tl.store(out + row * 2, first_piece)
    tl.store(out + row * 2 + 1, count)


def listed(
    contexts: list[int], aim: int, window: int = 0, stride: int = 1, least_keys: int = 64
) -> list[list[int]]:
    seqlens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    programs = triton.cdiv(aim + len(contexts) - 1, stride)
    out = torch.full((programs, 6), -1, dtype=torch.int32, device=DEVICE)
    list_kernel[programs,](seqlens, out, len(contexts), aim, stride, window, least_keys)
    return [piece for piece in out.tolist() if piece[0] < len(contexts)]


CONTEXTS = [[1], [5000], [70, 3, 900], [1] * 9, [4000, *[90] * 11], [333] * 7]


@pytest.mark.parametrize("contexts", CONTEXTS, ids=str)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("aim", [1, 12])
def test_pieces_cover_every_cached_key_once(contexts: list[int], window: int, aim: int) -> None:
    found = listed(contexts, aim, window)
    for row, context in enumerate(contexts):
        own = [piece for piece in found if piece[0] == row]
        assert {piece[2] for piece in own} == {len(own)}
        lowest = max(context - window, 0) if window else 0
        assert {piece[5] for piece in own} == {lowest}
        starts, ends = [piece[3] for piece in own], [piece[4] for piece in own]
        assert lowest - 16 < starts[0] <= lowest
        assert starts[1:] == ends[:-1]
        assert ends[-1] == context - 1
        assert all(start < end for start, end in pairwise([*starts, context]))


def test_a_long_row_beside_short_ones_gets_its_share() -> None:
    counts = [piece[2] for piece in listed([32000, *[500] * 31], aim=66)]
    assert counts.count(1) == 31
    assert counts[0] == 44
    assert len(counts) == 31 + 44


def test_rows_are_found_beyond_those_scanned_at_once() -> None:
    contexts = [1 + row % 3 for row in range(600)]
    contexts[300] = 2000
    expected = [row for row in range(600) for _ in range(13 if row == 300 else 1)]
    assert [piece[0] for piece in listed(contexts, 20, stride=41, least_keys=16)] == expected[::41]


def test_both_kernels_number_pieces_alike() -> None:
    contexts = [3, 700, 90, *[20] * 300, 400]
    seqlens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    out = torch.empty(len(contexts), 2, dtype=torch.int32, device=DEVICE)
    count_kernel[len(contexts),](seqlens, out, len(contexts), 15, 0, 64)
    pieces_of_rows = out.tolist()
    for (first, count), (following, _) in pairwise(pieces_of_rows):
        assert following == first + count
    for row, first, count, *_ in listed(contexts, 15, stride=23):
        assert [first, count] == pieces_of_rows[row]
