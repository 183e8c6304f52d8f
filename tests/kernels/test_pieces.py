"""How programs find their piece of a decode step's contexts."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 -- after the test of its presence

from mini_infer.kernels.triton import pieces  # noqa: E402

find_piece, find_row = pieces.find_piece, pieces.find_row


@triton.jit
def list_kernel(
    seqlens_k,
    cu_seqlens_q,
    out,
    num_rows,
    query_limit,
    aim,
    stride,
    window: tl.constexpr,
    least_keys: tl.constexpr,
    single: tl.constexpr,
):
    """Row, index in it, and number of the row's pieces, of every ``stride``-th piece."""
    piece = tl.program_id(0) * stride
    row, index, count = find_piece(
        seqlens_k, cu_seqlens_q, num_rows, query_limit, piece, aim, window, least_keys, single
    )
    out += tl.program_id(0) * 3
    tl.store(out, row)
    tl.store(out + 1, index)
    tl.store(out + 2, count)


@triton.jit
def rows_kernel(
    seqlens_k,
    cu_seqlens_q,
    out,
    num_rows,
    query_limit,
    aim,
    stride,
    window: tl.constexpr,
    least_keys: tl.constexpr,
    single: tl.constexpr,
):
    """First piece and number of pieces of every ``stride``-th row."""
    row = tl.program_id(0) * stride
    first_piece, count = find_row(
        seqlens_k, cu_seqlens_q, num_rows, query_limit, row, aim, window, least_keys, single
    )
    out += tl.program_id(0) * 2
    tl.store(out, first_piece)
    tl.store(out + 1, count)


@triton.jit
def bounds_kernel(out, lowest, cached, count, align: tl.constexpr):
    """First key and end of each piece of a row."""
    start, end = pieces.piece_bounds(lowest, cached, tl.program_id(0), count, align)
    tl.store(out + tl.program_id(0) * 2, start)
    tl.store(out + tl.program_id(0) * 2 + 1, end)


def launch(
    kernel: Any,
    programs: int,
    width: int,
    contexts: list[int],
    query_lens: list[int] | None,
    aim: int,
    *,
    window: int = 0,
    stride: int = 1,
    least_keys: int = 64,
    query_limit: int = 1,
) -> list[list[int]]:
    seqlens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *(query_lens or [])]).cumsum(0).to(DEVICE)
    out = torch.full((programs, width), -1, dtype=torch.int32, device=DEVICE)
    rows, single = len(contexts), query_lens is None
    kernel[programs,](
        seqlens, starts, out, rows, query_limit, aim, stride, window, least_keys, single
    )
    return out.tolist()


def listed(
    contexts: list[int], aim: int, query_lens: list[int] | None = None, stride: int = 1, **rest: int
) -> list[list[int]]:
    """``[row, index, count]`` of the pieces that exist; those that may not are at the end."""
    programs = triton.cdiv(aim + len(contexts) - 1, stride)
    found = launch(list_kernel, programs, 3, contexts, query_lens, aim, stride=stride, **rest)
    existing = [piece for piece in found if piece[2]]
    assert existing == found[: len(existing)]
    return existing


CONTEXTS = [[1], [5000], [70, 3, 900], [1] * 9, [4000, *[90] * 11], [333] * 7]


@pytest.mark.parametrize("contexts", CONTEXTS, ids=str)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("aim", [1, 12])
def test_every_row_has_pieces_in_order(contexts: list[int], window: int, aim: int) -> None:
    found = listed(contexts, aim, window=window)
    keys = [min(context, window or context) for context in contexts]
    share = max(64, -(-sum(keys) // aim))
    counts = [max(1, (length + share // 2) // share) for length in keys]
    expected = [[row, index, count] for row, count in enumerate(counts) for index in range(count)]
    assert found == expected


@pytest.mark.parametrize(("lowest", "cached"), [(0, 0), (0, 15), (0, 1000), (33, 40), (170, 5000)])
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("align", [1, 16, 64])
def test_the_pieces_of_a_row_are_even_and_cover_it(
    lowest: int, cached: int, count: int, align: int
) -> None:
    unit = max(align, 16)
    out = torch.empty(count, 2, dtype=torch.int32, device=DEVICE)
    bounds_kernel[count,](out, lowest, cached, count, align)
    bounds = out.tolist()
    assert lowest - unit < bounds[0][0] <= lowest
    assert bounds[-1][1] == cached
    assert all(end == start and end % unit == 0 for (_, end), (start, _) in pairwise(bounds))
    sizes = [end - start for start, end in bounds[:-1]]
    assert not sizes or max(sizes) - min(sizes) <= unit


def test_a_long_row_beside_short_ones_gets_its_share() -> None:
    counts = [count for _, _, count in listed([32000, *[500] * 31], aim=66)]
    assert counts == [44] * 44 + [1] * 31


def test_rows_are_found_beyond_those_scanned_at_once() -> None:
    contexts = [1 + row % 3 for row in range(600)]
    contexts[300] = 2000
    expected = [row for row in range(600) for _ in range(13 if row == 300 else 1)]
    found = listed(contexts, 20, stride=41, least_keys=16)
    assert [row for row, _, _ in found] == expected[::41]


def test_rows_of_too_many_queries_have_no_piece() -> None:
    found = listed([900, 70, 5000, 3], 10, [1, 3, 60, 2], query_limit=3)
    assert [[row, count] for row, index, count in found if index == 0] == [[0, 9], [1, 1], [3, 1]]


@pytest.mark.parametrize("query_lens", [None, [1, 2, 9, *[3] * 300, 1]])
def test_both_kernels_number_pieces_alike(query_lens: list[int] | None) -> None:
    contexts = [3, 700, 90, *[20] * 300, 400]
    found = listed(contexts, 15, query_lens, stride=60, query_limit=3)
    assert len(found) == 6
    for number, (row, index, count) in enumerate(found):
        rows = launch(rows_kernel, 2, 2, contexts, query_lens, 15, stride=row, query_limit=3)
        assert rows[1] == [number * 60 - index, count]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from mini_infer.kernels.triton.pieces import piece_kernel

constants = dict(window=0, block_size=16, align=16, least_keys=64, single=False)
types = dict(pieces="*i32", rows="*i32", seqlens_k="*i64", cu_seqlens_q="*i64", block_table="*i32")
types |= dict.fromkeys(constants, "constexpr")
signature = {name: types.get(name, "i32") for name in piece_kernel.arg_names}
source = triton.compiler.ASTSource(piece_kernel, signature, constants)
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="other tests compile it there")
def test_the_installed_triton_compiles_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions differ in what they can compile, which the interpreter does not show."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compiled = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-2000:]
