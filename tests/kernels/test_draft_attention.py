"""Attention of a token and its drafts in one call, against the reference in float64."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from mini_infer.kernels.metadata import Rope
from tests.kernels.paged_batches import POISON, Shape, paged_batch
from tests.kernels.test_flash_decoding import SHAPES, head_major, on_device, random
from tests.kernels.triton_device import DEVICE

draft_attention = pytest.importorskip("mini_infer.kernels.triton.draft_attention")

WIDTHS = [2, 5, 9]
CONTEXTS = {
    "nothing before": [0],
    "one token before": [1],
    "new keys begin a piece": [64],
    "and end the one before": [60],
    "several pieces": [300],
    "padded rows beside others": [0, 130, 0],
    "far apart": [3, 260, 17, 131],
}
"""Tokens before the new ones."""


class Step:
    """Rows of ``width`` new tokens: old keys in the cache, new slots and all others poisoned."""

    def __init__(
        self, before: Sequence[int], width: int, shape: Shape, dtype: torch.dtype = torch.float32
    ) -> None:
        contexts = [count + width for count in before]
        batch = paged_batch([width] * len(before), contexts, shape)
        heads, num_tokens = shape.num_kv_heads, width * len(before)
        self.meta = on_device(batch.meta)
        pair = torch.cat((batch.k_cache, batch.v_cache), 2)
        pair.flatten(0, 1)[batch.meta.slot_mapping] = POISON
        pair = pair.to(DEVICE, dtype)
        self.caches = pair[:, :, :heads], pair[:, :, heads:]
        if not shape.interleaved:
            self.caches = self.caches[0].contiguous(), self.caches[1].contiguous()
        self.qkv = random(num_tokens, shape.num_heads + 2 * heads, shape.head_dim, seed=1).to(dtype)
        angles = random(max(contexts), shape.head_dim // 2, seed=2)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        positions = torch.cat([torch.arange(count, count + width) for count in before])
        self.rope = Rope(table, positions.to(DEVICE))
        self.scale = shape.head_dim**-0.5
        weights = (random(shape.head_dim, seed=seed).to(dtype) for seed in (3, 4))
        self.qk_norm = (*weights, 1e-6)

    def run(self, window: int | None = None, with_norm: bool = False) -> Tensor:
        """Compares output and caches with the reference; returns the output."""
        exact = [cache.double() for cache in self.caches]
        qk_norm = self.qk_norm if with_norm else None
        expected = reference.attend(
            self.qkv.double(),
            self.rope,
            *exact,
            self.meta,
            self.scale,
            window,
            (qk_norm[0].double(), qk_norm[1].double(), qk_norm[2]) if qk_norm else None,
        )
        out: Tensor = draft_attention.draft_attention(
            self.qkv, self.rope, *self.caches, self.meta, self.scale, window, qk_norm
        )
        assert out.dtype == self.qkv.dtype
        tolerance = 3e-6 if out.dtype == torch.float32 else 1e-2
        close = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(out.double(), expected, **close)
        for cache, correct in zip(self.caches, exact, strict=True):
            torch.testing.assert_close(cache.double(), correct, **close)
        return out


@pytest.mark.parametrize("before", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_mix_of_contexts(before: list[int], width: int) -> None:
    Step(before, width, SHAPES[0]).run(with_norm=width == 5)


@pytest.mark.parametrize("before", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("window", [3, 100])
def test_sliding_windows(before: list[int], window: int) -> None:
    Step(before, 5, SHAPES[0]).run(window)


@pytest.mark.parametrize("shape", SHAPES[1:5], ids=lambda s: f"{s.num_heads} heads of {s.head_dim}")
@pytest.mark.parametrize("width", [2, 4])
def test_shapes_of_heads_and_blocks(shape: Shape, width: int) -> None:
    Step([70, 3, 0], width, shape).run(with_norm=True)


@pytest.mark.parametrize("block_size", [64, 256])
@pytest.mark.parametrize("before", [59, 64, 124])
def test_blocks_as_large_as_a_piece(block_size: int, before: int) -> None:
    Step([before], 5, Shape(num_heads=2, num_kv_heads=1, block_size=block_size)).run()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=lambda s: f"blocks of {s.block_size}")
def test_heads_that_lie_apart(shape: Shape) -> None:
    step = Step([300, 3, 0], 3, shape)
    step.caches = head_major(step.caches[0]), head_major(step.caches[1])
    step.run()


def test_half_precision() -> None:
    """Bfloat16, whose products the interpreter gets wrong, is among the GPU's tests."""
    Step([300, 40], 5, SHAPES[1], torch.float16).run(with_norm=True)


def test_rows_of_a_graph_that_was_captured_for_longer_contexts() -> None:
    """The grid is that of 4,096 keys: surplus programs write nothing."""
    step = Step([130, 3], 5, SHAPES[0])
    step.meta = replace(step.meta, max_seqlen_k=4096)
    step.run()


@pytest.mark.parametrize(
    ("query_lens", "group", "head_dim", "takes"),
    [
        ((5, 5), 3, 64, True),
        ((5,), 7, 64, True),
        ((9,), 2, 64, True),
        ((2,), 7, 128, True),
        ((5,), 7, 128, False),  # too many values to rotate
        ((2,), 1, 256, False),
        ((10,), 1, 64, False),
        ((1, 1), 3, 64, False),
        ((5, 4), 3, 64, False),
        ((1, 5), 3, 64, False),
        ((5,) * 7, 3, 64, False),  # not mostly latency
    ],
)
def test_steps_that_it_takes(
    query_lens: tuple[int, ...], group: int, head_dim: int, takes: bool
) -> None:
    meta = paged_batch(query_lens, query_lens, SHAPES[0]).meta
    assert draft_attention.takes_drafts(meta, group, head_dim, norms=False) is takes
    assert draft_attention.takes_drafts(meta, group, head_dim, norms=True) is (
        takes and head_dim <= 64
    )
