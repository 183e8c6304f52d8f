"""A decode step's attention on a GPU at real sizes: fresh inputs, float64, poisoned memory."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.kernels.triton import decode_attention, linear
from tests.kernels.paged_batches import metadata

DEVICE = torch.device("cuda")
BLOCK = 16
LONGEST = 33_000
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HEADS = [(28, 4, 128), (16, 8, 128), (9, 3, 64), (8, 2, 80), (6, 2, 96), (8, 2, 256)]
CONTEXTS = {
    "one long": [LONGEST],
    "one short": [90],
    "first tokens": [1, 1, 2],
    "mixed": [3, 700, 64, 65, 5000, 1, 130],
    "one long beside short ones": [9000, *[300] * 31],
    "a large batch": [40 + row for row in range(300)],
}


def random_rope(head_dim: int) -> Tensor:
    angles = torch.randn(LONGEST, head_dim // 2, device=DEVICE)
    return torch.cat((angles.cos(), angles.sin()), -1)


def decode_metadata(contexts: Sequence[int], width: int = 1) -> AttentionMetadata:
    """``width`` queries a row."""
    generator = torch.Generator()
    generator.seed()  # fresh inputs in every run
    meta = metadata([width] * len(contexts), contexts, BLOCK, generator)
    names = ("cu_seqlens_q", "seqlens_k", "block_table", "slot_mapping")
    return replace(meta, **{name: getattr(meta, name).to(DEVICE) for name in names})


def positions(meta: AttentionMetadata) -> Tensor:
    """Of each token: a row's queries stand at the end of its context."""
    lens = meta.cu_seqlens_q.diff()
    behind = meta.cu_seqlens_q[1:].repeat_interleave(lens)
    behind -= torch.arange(len(behind), device=DEVICE)
    return meta.seqlens_k.long().repeat_interleave(lens) - behind


class Layer:
    """Inputs of one layer's attention; the slots of new tokens hold a large value."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        meta: AttentionMetadata,
        dtype: torch.dtype,
        table: Tensor,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        num_blocks = sum(-(-context // BLOCK) for context in meta.context_lens)
        # A head's keys of a block are one piece of memory, as in the engine's caches.
        shape = (num_blocks, 2, num_kv_heads, BLOCK, head_dim)
        self.pair = torch.randn(shape, device=DEVICE, dtype=dtype)
        self.caches = self.pair[:, 0].transpose(1, 2), self.pair[:, 1].transpose(1, 2)
        for cache in self.caches:
            cache[meta.slot_mapping // BLOCK, meta.slot_mapping % BLOCK] = 3e4
        rows, total = len(meta.slot_mapping), num_heads + 2 * num_kv_heads
        self.qkv = torch.randn(rows, total, head_dim, device=DEVICE, dtype=dtype)
        weights = (torch.randn(head_dim, device=DEVICE, dtype=dtype) for _ in range(2))
        self.qk_norm = (*weights, 1e-6)
        self.table, self.scale = table, head_dim**-0.5

    def arguments(self, meta: AttentionMetadata, window: int | None, with_norm: bool) -> tuple:
        rope = Rope(self.table, positions(meta))
        qk_norm = self.qk_norm if with_norm else None
        return self.qkv, rope, *self.caches, meta, self.scale, window, qk_norm

    def exact(self, meta: AttentionMetadata, window: int | None, with_norm: bool) -> list[Tensor]:
        """Output and caches in float64."""
        qkv, rope, *caches, meta, scale, window, norm = self.arguments(meta, window, with_norm)
        caches = [cache.double() for cache in caches]
        if norm is not None:
            norm = (norm[0].double(), norm[1].double(), norm[2])
        out = reference.attend(qkv.double(), rope, *caches, meta, scale, window, norm)
        return [out, *caches]


def assert_near(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[out.dtype]


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "window", "with_norm"),
    [*((heads, None, heads[1] == 8) for heads in HEADS), (HEADS[0], 100, False)],
    ids=str,
)
def test_against_float64(
    heads: tuple[int, int, int],
    window: int | None,
    with_norm: bool,
    dtype: torch.dtype,
    contexts: list[int],
) -> None:
    meta = decode_metadata(contexts)
    layer = Layer(heads, meta, dtype, random_rope(heads[2]))
    exact = layer.exact(meta, window, with_norm)
    torch.full((64 << 20,), math.nan, device=DEVICE)  # what an unwritten element would show
    out = decode_attention(*layer.arguments(meta, window, with_norm))
    for result, expected in zip((out, *layer.caches), exact, strict=True):
        assert_near(result, expected)


def test_a_graph_of_the_longest_context_serves_shorter_ones() -> None:
    """Captured once; then contexts, tables and inputs change in place, as a decode step's do."""
    captured = decode_metadata([LONGEST, LONGEST, LONGEST])
    layer = Layer(HEADS[0], captured, torch.bfloat16, random_rope(128))
    arguments = layer.arguments(captured, None, False)
    decode_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*arguments)
    for contexts in ([LONGEST] * 3, [1, 700, 1], [130, 64, 33], [20_000, 1, 5]):
        step = decode_metadata(contexts)
        captured.seqlens_k.copy_(step.seqlens_k)
        arguments[1].positions.copy_(step.seqlens_k - 1)
        captured.slot_mapping.copy_(step.slot_mapping)
        captured.block_table.zero_()
        captured.block_table[:, : step.block_table.shape[1]] = step.block_table
        layer.qkv.normal_()
        layer.pair.normal_()
        out.fill_(math.nan)
        exact = layer.exact(step, None, False)
        graph.replay()
        for result, expected in zip((out, *layer.caches), exact, strict=True):
            assert_near(result, expected)


def test_layers_that_start_early_do_not_overtake_each_other() -> None:
    """A chain in which each layer reads what the last one wrote, against one with waits between."""
    meta = decode_metadata([700, 90])
    layers = [Layer(HEADS[0], meta, torch.bfloat16, random_rope(128)) for _ in range(20)]
    before = [layer.pair.clone() for layer in layers]
    arguments = [layer.arguments(meta, None, False) for layer in layers]
    weight = torch.randn(36 * 128, 28 * 128, device=DEVICE, dtype=torch.bfloat16) / 60

    def run(wait: bool) -> Tensor:
        out = layers[0].qkv[:, :28].flatten(1)
        for _, *rest in arguments:
            x = linear(out, weight)
            if wait:
                torch.cuda.synchronize()
            out = decode_attention(x.view(2, 36, 128), *rest)
            if wait:
                torch.cuda.synchronize()
        return out

    expected = run(wait=True).clone()
    pairs = [layer.pair.clone() for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(wait=False)
    for _ in range(10):
        for layer, pair in zip(layers, before, strict=True):
            layer.pair.copy_(pair)
        result.fill_(math.nan)
        graph.replay()
        assert torch.equal(result, expected)
        for layer, pair in zip(layers, pairs, strict=True):
            assert torch.equal(layer.pair, pair)
