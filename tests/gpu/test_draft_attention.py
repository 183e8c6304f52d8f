"""Attention of a token and its drafts on a GPU at real sizes: fresh inputs, float64, poison."""

import math

import pytest
import torch
from torch import Tensor

from mini_infer.kernels.triton import draft_attention, linear
from tests.gpu.test_flash_decoding import (
    DEVICE,
    LONGEST,
    TOLERANCE,
    Layer,
    assert_near,
    decode_metadata,
    positions,
    random_rope,
)

HEADS = [(9, 3, 64), (14, 2, 64), (28, 4, 128), (16, 8, 128)]
CONTEXTS = {
    "one long": [LONGEST],
    "one short": [90],
    "first tokens": [9, 9, 10],
    "mixed": [13, 700, 64, 65, 5000, 9, 130],
    "one long beside short ones": [9000, *[300] * 15],
}


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [2, 3, 5, 9])
@pytest.mark.parametrize(
    ("heads", "window", "with_norm"),
    [*((heads, None, heads[1] == 8) for heads in HEADS), (HEADS[0], 100, True)],
    ids=str,
)
def test_against_float64(
    heads: tuple[int, int, int],
    window: int | None,
    with_norm: bool,
    width: int,
    dtype: torch.dtype,
    contexts: list[int],
) -> None:
    meta = decode_metadata(contexts, width)
    layer = Layer(heads, meta, dtype, random_rope(heads[2]))
    exact = layer.exact(meta, window, with_norm)
    torch.full((64 << 20,), math.nan, device=DEVICE)  # what an unwritten element would show
    out = draft_attention(*layer.arguments(meta, window, with_norm))
    for result, expected in zip((out, *layer.caches), exact, strict=True):
        assert_near(result, expected)


def test_a_graph_of_the_longest_context_serves_shorter_ones() -> None:
    captured = decode_metadata([LONGEST, LONGEST, LONGEST], 5)
    layer = Layer(HEADS[0], captured, torch.bfloat16, random_rope(64))
    arguments = layer.arguments(captured, None, False)
    draft_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draft_attention(*arguments)
    for contexts in ([LONGEST] * 3, [5, 700, 5], [130, 64, 33], [20_000, 6, 9]):
        step = decode_metadata(contexts, 5)
        captured.seqlens_k.copy_(step.seqlens_k)
        arguments[1].positions.copy_(positions(step))
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
    meta = decode_metadata([700, 90], 3)
    layers = [Layer(HEADS[1], meta, torch.bfloat16, random_rope(64)) for _ in range(20)]
    before = [layer.pair.clone() for layer in layers]
    arguments = [layer.arguments(meta, None, False) for layer in layers]
    weight = torch.randn(18 * 64, 14 * 64, device=DEVICE, dtype=torch.bfloat16) / 30

    def run(wait: bool) -> Tensor:
        out = layers[0].qkv[:, :14].flatten(1)
        for _, *rest in arguments:
            x = linear(out, weight)
            if wait:
                torch.cuda.synchronize()
            out = draft_attention(x.view(6, 18, 64), *rest)
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
