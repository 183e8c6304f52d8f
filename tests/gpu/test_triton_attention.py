"""Paged attention on a GPU at real sizes: fresh random inputs, float64, poisoned outputs."""

import math

import pytest
import torch
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton import attention
from tests.kernels.paged_batches import metadata

DEVICE = torch.device("cuda")
BLOCK = 16
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HEADS = [(28, 4, 128), (16, 8, 128), (9, 3, 64), (8, 2, 80), (6, 2, 96), (8, 2, 256)]
CASES = [
    *((heads, None, dtype) for heads in HEADS for dtype in (torch.float16, torch.bfloat16)),
    *((HEADS[0], 100, dtype) for dtype in (torch.float16, torch.bfloat16)),
    # The shortest and the longest: without tensor cores, each takes seconds to compile.
    ((9, 3, 64), None, torch.float32),
    ((8, 2, 256), 100, torch.float32),
]
STEPS = {
    "one long decode": ([1], [33_000]),
    "decodes": ([1] * 5, [3, 700, 64, 65, 5000]),
    "drafts": ([5, 3, 8], [1000, 2000, 8]),
    "chunks beside decodes": ([300, 1, 4, 77], [300, 9000, 129, 777]),
    "the rest of a cached prompt": ([64], [2112]),
    "such rests beside decodes": ([64, 1, 20, 9, 1], [2112, 700, 5000, 2057, 64]),
}


def on_gpu(meta: AttentionMetadata) -> AttentionMetadata:
    return AttentionMetadata(
        meta.cu_seqlens_q.to(DEVICE),
        meta.seqlens_k.to(DEVICE),
        meta.block_table.to(DEVICE),
        meta.slot_mapping.to(DEVICE),
        meta.max_query_len,
        meta.max_seqlen_k,
        meta.query_lens,
        meta.context_lens,
    )


def poison_free_memory() -> None:
    """What the allocator hands out next is full of NaN: an element left unwritten shows."""
    torch.full((64 << 20,), math.nan, device=DEVICE)


def exact(q: Tensor, pair: Tensor, meta: AttentionMetadata, window: int | None) -> Tensor:
    """Row by row in float64."""
    heads = pair.shape[2] // 2
    group, out, begin = q.shape[1] // heads, [], 0
    for row, (length, context) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
        blocks = meta.block_table[row, : -(-context // BLOCK)].long()
        kv = pair[blocks].flatten(0, 1)[:context].double()
        query = q[begin : begin + length].double().unflatten(1, (heads, group))
        scores = torch.einsum("qhgd,khd->hgqk", query, kv[:, :heads]) * q.shape[2] ** -0.5
        age = torch.arange(context - length, context, device=DEVICE)[:, None]
        age = age - torch.arange(context, device=DEVICE)
        hidden = (age < 0) | (age >= (window or context))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out.append(torch.einsum("hgqk,khd->qhgd", weights, kv[:, heads:]).flatten(1, 2))
        begin += length
    return torch.cat(out)


@pytest.mark.parametrize(("heads", "window", "dtype"), CASES, ids=str)
def test_against_float64(
    heads: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator()
    generator.seed()  # fresh inputs in every run
    for query_lens, context_lens in STEPS.values():
        meta = on_gpu(metadata(query_lens, context_lens, BLOCK, generator))
        num_blocks = sum(-(-context // BLOCK) for context in context_lens)
        shape = (num_blocks, BLOCK, 2 * num_kv_heads, head_dim)
        pair = torch.randn(shape, device=DEVICE, dtype=dtype)
        q = torch.randn(sum(query_lens), num_heads, head_dim, device=DEVICE, dtype=dtype)
        poison_free_memory()
        caches = pair[:, :, :num_kv_heads], pair[:, :, num_kv_heads:]
        out = attention.paged_attention(q, *caches, meta, head_dim**-0.5, window)
        expected = exact(q, pair, meta, window)
        error = (out.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], f"{query_lens} {context_lens}: {error}"


def test_a_graph_of_the_longest_context_serves_shorter_ones() -> None:
    """Captured once; then contexts and block tables change in place, as a decode step's do."""
    generator = torch.Generator().manual_seed(0)
    captured = on_gpu(metadata([1, 1], [4096, 4096], BLOCK, generator))
    pair = torch.randn(512, BLOCK, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(2, 28, 128, device=DEVICE, dtype=torch.bfloat16)
    arguments = (q, pair[:, :, :4], pair[:, :, 4:], captured, 128**-0.5)
    attention.paged_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.paged_attention(*arguments)
    for contexts in ([4096, 4096], [1, 700], [130, 64]):
        step = on_gpu(metadata([1, 1], contexts, BLOCK, generator))
        captured.seqlens_k.copy_(step.seqlens_k)
        captured.block_table.zero_()
        captured.block_table[:, : step.block_table.shape[1]] = step.block_table
        q.normal_()
        out.fill_(math.nan)
        graph.replay()
        expected = exact(q, pair, step, None)
        assert (out.double() - expected).norm() / expected.norm() < TOLERANCE[q.dtype]


LONE_CHUNKS = [([64], [2112]), ([64], [64]), ([60, 4], [2060, 4]), ([9, 55], [900, 55])]
CHUNKS = [
    *LONE_CHUNKS[:2],
    ([1, 40, 2, 1, 20], [3000, 2088, 700, 1, 5000]),
    ([13, 13, 13, 13, 12], [130, 1037, 525, 2061, 12]),
    ([1] * 7 + [57], [900] * 7 + [8192]),
]


@pytest.mark.parametrize("heads", [(28, 4, 128), (16, 8, 128)], ids=str)
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize(
    ("nominal", "steps"), [((0, 64), LONE_CHUNKS), ((1,) * 7 + (64,), CHUNKS)], ids=["lone", "few"]
)
def test_a_graph_of_chunks_serves_other_lengths(
    nominal: tuple[int, ...],
    steps: list[tuple[list[int], list[int]]],
    heads: tuple[int, int, int],
    window: int | None,
) -> None:
    """Captured as ``ChunkGraphs`` does, for one chunk of the longest context; replayed with rows of
    other numbers of queries, and of none, behind other contexts."""
    num_heads, num_kv_heads, head_dim = heads
    num_rows, num_tokens, longest = len(nominal), 64, 8192
    captured = AttentionMetadata(
        cu_seqlens_q=torch.zeros(num_rows + 1, dtype=torch.int64, device=DEVICE),
        seqlens_k=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
        block_table=torch.zeros(num_rows, longest // BLOCK, dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE),
        max_query_len=num_tokens,
        max_seqlen_k=longest,
        query_lens=nominal,
        context_lens=(longest,) * num_rows,
    )
    shape = (1024, BLOCK, 2 * num_kv_heads, head_dim)
    pair = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(num_tokens, num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    caches = pair[:, :, :num_kv_heads], pair[:, :, num_kv_heads:]
    arguments = (q, *caches, captured, head_dim**-0.5, window)
    attention.paged_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.paged_attention(*arguments)
        after = out * 2.0  # what comes next finds the joined results
    generator = torch.Generator()
    generator.seed()
    for query_lens, contexts in steps:
        step = on_gpu(metadata(query_lens, contexts, BLOCK, generator))
        rows = len(query_lens)
        captured.cu_seqlens_q.fill_(num_tokens)  # the rows left over have no queries
        captured.cu_seqlens_q[: rows + 1] = step.cu_seqlens_q
        captured.seqlens_k.zero_()
        captured.seqlens_k[:rows] = step.seqlens_k
        captured.block_table.zero_()
        captured.block_table[:rows, : step.block_table.shape[1]] = step.block_table
        q.normal_()
        out.fill_(math.nan)
        graph.replay()
        expected = exact(q, pair, step, window)
        error = (out.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[q.dtype], f"{query_lens} {contexts}: {error}"
        assert torch.equal(after, out * 2.0)
