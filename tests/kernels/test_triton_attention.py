"""Paged attention in Triton against float64: every branch at sizes that the interpreter can do."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from tests.kernels.paged_batches import POISON, PagedBatch, Shape, paged_batch
from tests.kernels.triton_device import DEVICE

attention = pytest.importorskip("mini_infer.kernels.triton.attention")
split = pytest.importorskip("mini_infer.kernels.triton.split_attention")
splits = pytest.importorskip("mini_infer.kernels.triton.tile_splits")
tiled = pytest.importorskip("mini_infer.kernels.triton.tiled_attention")

STEPS = {
    "one decode": ([1], [9]),
    "first token": ([1], [1]),
    "decodes far apart": ([1, 1, 1], [3, 300, 131]),
    "drafts": ([3, 2], [140, 12]),
    "most drafts": ([8], [70]),
    "whole prompt": ([13], [13]),
    "later chunk over several tiles": ([90], [160]),
    "prompts side by side": ([9, 33, 70], [9, 40, 70]),
    "chunks beside decodes and drafts": ([1, 20, 3, 1, 70], [33, 40, 66, 129, 70]),
}
SHAPES = [
    Shape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16),
    Shape(num_heads=7, num_kv_heads=1, head_dim=64, block_size=16),
    Shape(num_heads=2, num_kv_heads=2, head_dim=80, block_size=1, interleaved=False),
    Shape(num_heads=6, num_kv_heads=2, head_dim=96, block_size=4),
]


def on_device(batch: PagedBatch, dtype: torch.dtype = torch.float32) -> PagedBatch:
    """The batch on the tests' device, with the strides that its caches have."""
    meta = replace(
        batch.meta,
        **{
            name: getattr(batch.meta, name).to(DEVICE)
            for name in ("cu_seqlens_q", "seqlens_k", "block_table", "slot_mapping")
        },
    )
    heads = batch.k_cache.shape[2]
    pair = torch.cat((batch.k_cache, batch.v_cache), dim=2).to(DEVICE, dtype)
    caches = pair[:, :, :heads], pair[:, :, heads:]
    if batch.k_cache.is_contiguous():
        caches = caches[0].contiguous(), caches[1].contiguous()
    return PagedBatch(batch.q.to(DEVICE, dtype), *caches, meta, batch.scale)


def check(batch: PagedBatch, window: int | None = None, dtype: torch.dtype = torch.float32) -> None:
    batch = on_device(batch, dtype)
    out = attention.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.meta, batch.scale, window
    )
    exact = batch.in_dtype(torch.float64)
    expected = reference.paged_attention(
        exact.q, exact.k_cache, exact.v_cache, exact.meta, exact.scale, window
    )
    assert out.dtype == dtype
    assert out.abs().max() < POISON / 1000, "an unwritten slot was looked at"
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_every_mix_of_lengths(lengths: tuple[list[int], list[int]]) -> None:
    check(paged_batch(*lengths, SHAPES[0]))


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("window", [1, 5, 64])
def test_sliding_windows(lengths: tuple[list[int], list[int]], window: int) -> None:
    check(paged_batch(*lengths, SHAPES[0]), window)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda s: f"{s.num_heads} heads of {s.head_dim}")
def test_shapes_of_heads_and_blocks(shape: Shape) -> None:
    check(paged_batch([1, 20, 3], [70, 40, 21], shape))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("query_len", [1, 12])
def test_large_heads(head_dim: int, query_len: int) -> None:
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=head_dim, block_size=16)
    check(paged_batch([query_len], [75], shape))


@pytest.mark.parametrize("query_len", [1, 12])
def test_half_precision(query_len: int) -> None:
    """Bfloat16, whose products the interpreter gets wrong, is among the GPU's tests."""
    check(paged_batch([query_len, 1], [75, 30], SHAPES[1]), dtype=torch.float16)


@pytest.mark.parametrize(
    ("num_rows", "num_kv_heads", "max_keys", "num_pieces"),
    [
        pytest.param(1, 4, 32768, 66, id="one request: two programs a processor"),
        pytest.param(1, 4, 256, 4, id="never more pieces than are worth their cost"),
        pytest.param(1, 4, 90, 1, id="a short context is one piece"),
        pytest.param(32, 4, 32768, 64, id="rows share a program a processor"),
        pytest.param(64, 4, 32768, 129, id="many rows: two programs a processor"),
        pytest.param(128, 4, 32768, 259, id="more rows: four programs a processor"),
        pytest.param(2, 300, 32768, 2, id="more heads than processors"),
    ],
)
def test_launches_are_sized_from_counts_and_the_longest_context(
    num_rows: int, num_kv_heads: int, max_keys: int, num_pieces: int
) -> None:
    plan = split.plan_splits(num_rows, num_kv_heads, 7, max_keys, 256, 132, 227 * 1024)
    assert plan.num_pieces == num_pieces
    assert plan.is_whole == (num_pieces == num_rows)


@pytest.mark.parametrize(
    ("width", "num_heads", "num_kv_heads", "keys"),
    [
        (1, 28, 4, 64),
        (2, 28, 4, 64),
        (3, 28, 4, 64),
        (5, 28, 4, 32),
        (9, 28, 4, 32),
        (9, 14, 2, 32),
    ],
)
def test_few_keys_beside_the_queries_of_many_drafts(
    width: int, num_heads: int, num_kv_heads: int, keys: int
) -> None:
    """At batch 1 a program's shared memory is small, or no kernel after it starts early."""
    group = num_heads // num_kv_heads
    plan = split.plan_splits(1, num_kv_heads, width * group, 4096, 256, 132, 227 * 1024)
    assert plan.tiles.rows == max(16, 1 << (width * group - 1).bit_length())
    assert (plan.tiles.keys, plan.tiles.num_stages) == (keys, 2)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(28, 4), (14, 2), (16, 8), (9, 3), (32, 2), (6, 6), (32, 32)]
)
def test_each_way_of_splitting_short_rows_is_rehearsed(
    num_heads: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "num_sms", lambda _: 132)
    monkeypatch.setattr(attention, "shared_memory", lambda _: 227 * 1024)
    pairs = attention.short_rows(num_heads, num_kv_heads, 256, 255, torch.device("cpu"))

    def tiles(queries: int, rows: int) -> Any:
        total = queries * num_heads // num_kv_heads
        return split.plan_splits(rows, num_kv_heads, total, 4096, 256, 132, 227 * 1024).tiles

    counts = range(1, attention.SHORT_QUERY + 1), range(1, 256)
    assert {tiles(*pair) for pair in product(*counts)} == {tiles(*pair) for pair in pairs}
    assert len(pairs) == len({tiles(*pair) for pair in pairs})


@pytest.mark.parametrize("head_bytes", [128, 160, 256, 512, 1024])
@pytest.mark.parametrize("kib", [227, 163, 99])
def test_tiles_fit_the_memory_of_smaller_cards(head_bytes: int, kib: int) -> None:
    """Up to heads of a kibibyte: float32, 256 dimensions."""
    plan = split.plan_splits(4, 2, 8, 4096, head_bytes, 132, kib * 1024)
    heads = {"num_kv_heads": 2, "group": 8, "head_dim": head_bytes // 2}
    long_tiles = [plan_tiles((length,), heads, 4096, kib * 1024)[0] for length in (9, 64, 8192)]
    for tiles in (plan.tiles, *long_tiles):
        padded = 1 << (head_bytes - 1).bit_length()
        used = (tiles.rows + 2 * tiles.keys * tiles.num_stages) * padded
        assert used <= kib * 1024


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"blocks of {s.block_size}")
def test_heads_that_lie_apart(shape: Shape) -> None:
    """A head's keys of a block are one piece of memory, as on a GPU."""
    batch = on_device(paged_batch([1, 20, 3], [70, 40, 21], shape))
    caches = (
        cache.transpose(1, 2).contiguous().transpose(1, 2)
        for cache in (batch.k_cache, batch.v_cache)
    )
    arguments = (*caches, batch.meta, batch.scale)
    out = attention.paged_attention(batch.q, *arguments)
    expected = reference.paged_attention(batch.q, *arguments)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_rows_of_a_graph_that_was_captured_for_other_chunks() -> None:
    """The host knows the captured lengths: two single tokens and a chunk. Replayed are a token, a
    short chunk, and a row without any."""
    batch = on_device(paged_batch([1, 5], [300, 70], SHAPES[0]))
    meta, zero = batch.meta, torch.zeros(1, dtype=torch.int32, device=DEVICE)
    graph_meta = replace(
        meta,
        cu_seqlens_q=torch.cat((meta.cu_seqlens_q, zero + 6)),
        seqlens_k=torch.cat((meta.seqlens_k, zero)),
        block_table=torch.cat((meta.block_table, meta.block_table[:1])),
        query_lens=(1, 1, 6),
        context_lens=(4096,) * 3,
        max_query_len=6,
        max_seqlen_k=4096,
    )
    arguments = (batch.q, batch.k_cache, batch.v_cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SHORT_QUERY", 4)
        out = attention.paged_attention(*arguments, graph_meta, batch.scale)
    expected = reference.paged_attention(*arguments, meta, batch.scale)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_more_splits_than_a_row_has_tiles() -> None:
    """A graph is captured for the longest context: shorter rows leave splits empty."""
    batch = paged_batch([1, 1], [70, 3], SHAPES[0])
    meta = replace(batch.meta, max_seqlen_k=4096)
    check(PagedBatch(batch.q, batch.k_cache, batch.v_cache, meta, batch.scale))


def test_queries_may_be_a_slice_of_the_packed_projection() -> None:
    batch = on_device(paged_batch([1, 11], [40, 11], SHAPES[0]))
    packed = torch.randn(12, 8, 16, device=DEVICE)
    packed[:, 2:6] = batch.q
    arguments = (batch.k_cache, batch.v_cache, batch.meta, batch.scale)
    out = attention.paged_attention(packed[:, 2:6], *arguments)
    assert torch.equal(out, attention.paged_attention(batch.q, *arguments))


SPLIT_STEPS = {
    "a chunk behind a cached prompt": ([20], [400]),
    "decodes and drafts beside chunks": ([1, 20, 3, 1, 12], [33, 400, 66, 29, 300]),
    "contexts that are worth no split, or few": ([10, 10, 10], [10, 130, 450]),
}
SPLIT_SHAPE = Shape(num_heads=2, num_kv_heads=1, head_dim=16, block_size=16)
TILED_SHAPES = [
    Shape(num_heads=7, num_kv_heads=1, head_dim=128, block_size=16),
    Shape(num_heads=2, num_kv_heads=2, head_dim=80, block_size=16),
    Shape(num_heads=6, num_kv_heads=2, head_dim=64, block_size=5),
]


@pytest.fixture
def many_processors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many processors as make splits worthwhile, and poison in memory that is handed out.

    Gives the number of splits of each launch.
    """
    launched: list[int] = []
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        memory = empty(*args, **options)
        return memory.fill_(math.nan) if memory.is_floating_point() else memory

    def plan(*args: Any) -> Any:
        tiles, num_splits = splits.plan_tiles(*args)
        launched.append(num_splits)
        return tiles, num_splits

    monkeypatch.setattr(tiled, "num_sms", lambda device: 64)
    monkeypatch.setattr(tiled, "plan_tiles", plan)
    monkeypatch.setattr(torch, "empty", poisoned)
    return launched


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("lengths", SPLIT_STEPS.values(), ids=SPLIT_STEPS)
def test_keys_of_a_tile_are_split(
    lengths: tuple[list[int], list[int]], window: int | None, many_processors: list[int]
) -> None:
    check(paged_batch(*lengths, SPLIT_SHAPE), window)
    assert (many_processors[0] > 1) == (window != 40)


@pytest.mark.parametrize("shape", TILED_SHAPES, ids=lambda s: f"{s.num_heads} of {s.head_dim}")
def test_splits_of_any_heads(shape: Shape, many_processors: list[int]) -> None:
    check(paged_batch([1, 10], [30, 300], shape))
    assert many_processors[0] > 1


@pytest.mark.parametrize("window", [None, 150])
def test_splits_of_which_some_queries_see_nothing(
    window: int | None, monkeypatch: pytest.MonkeyPatch, many_processors: list[int]
) -> None:
    """The last ones are newer than a tile's first queries, the first ones of a window too old for
    the last. Joined one by one: there may be no highest sum yet."""
    monkeypatch.setattr(splits, "JOINED_SPLITS", 1)
    check(paged_batch([66], [256], Shape(num_heads=1, num_kv_heads=1, head_dim=80)), window)
    assert many_processors[0] > 2


def test_a_graph_of_split_tiles_serves_other_lengths(many_processors: list[int]) -> None:
    """Captured for a chunk of the longest context. Replayed are a token that is a decode's, rows
    without queries first, between and last, and chunks with several splits, and with one."""
    query_lens, context_lens = [0, 1, 25, 0, 10, 0], [0, 30, 500, 0, 40, 0]
    batch = on_device(paged_batch([1, 25, 10], [30, 500, 40], SPLIT_SHAPE))
    rows = torch.tensor([0, 0, 1, 1, 2, 2], device=DEVICE)
    meta = replace(
        batch.meta,
        cu_seqlens_q=torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int(),
        seqlens_k=torch.tensor(context_lens, device=DEVICE).int(),
        block_table=batch.meta.block_table[rows],
        query_lens=(1,) * 5 + (36,),
        context_lens=(4096,) * 6,
        max_query_len=36,
        max_seqlen_k=4096,
    )
    arguments = (batch.q, batch.k_cache, batch.v_cache)
    out = attention.paged_attention(*arguments, meta, batch.scale)
    expected = reference.paged_attention(*arguments, batch.meta, batch.scale)
    assert many_processors[0] > 4
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


QWEN_7B = {"num_kv_heads": 4, "group": 7, "head_dim": 128}
QWEN_06B = {"num_kv_heads": 8, "group": 2, "head_dim": 128}


@pytest.mark.parametrize(
    ("query_lens", "heads", "max_keys", "num_splits"),
    [
        pytest.param((1,) * 7 + (64,), QWEN_7B, 32768, 8, id="a program a processor"),
        pytest.param((64,), QWEN_7B, 300, 2, id="as many as there are keys for"),
        pytest.param((64,), QWEN_7B, 64, 1, id="a short context is whole"),
        pytest.param((2048,), QWEN_7B, 32768, 1, id="enough tiles"),
        pytest.param((1,) * 300 + (64,), QWEN_7B, 32768, 1, id="many rows: many empty tiles"),
    ],
)
def test_tiles_are_split_where_processors_would_idle(
    query_lens: tuple[int, ...], heads: dict[str, int], max_keys: int, num_splits: int
) -> None:
    assert plan_tiles(query_lens, heads, max_keys)[1] == num_splits


def test_programs_share_a_processor_where_there_are_enough() -> None:
    few, many = plan_tiles((2048,), QWEN_06B, 2048)[0], plan_tiles((2048,), QWEN_7B, 2048)[0]
    assert (few.rows, few.num_stages, few.max_registers) == (128, 3, None)
    assert (many.rows, many.num_stages, many.max_registers) == (128, 2, 128)
    assert plan_tiles((16,), QWEN_06B, 2048)[0].rows == 64


def test_sums_of_a_tile_fit_the_memory_of_a_turing_card() -> None:
    tiles = plan_tiles((2048,), QWEN_7B, 2048, memory=64 * 1024)[0]
    assert (tiles.rows, tiles.keys, tiles.num_warps) == (64, 32, 4)


def plan_tiles(
    query_lens: tuple[int, ...], heads: dict[str, int], max_keys: int, memory: int = 227 * 1024
) -> Any:
    return splits.plan_tiles(
        query_lens,
        query_limit=1,
        num_tokens=sum(query_lens),
        **heads,
        itemsize=2,
        max_keys=max_keys,
        window=0,
        sms=132,
        memory=memory,
    )
