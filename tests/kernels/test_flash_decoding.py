"""A decode step's attention in one call, against the reference in float64, in the interpreter."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from mini_infer.kernels.metadata import AttentionMetadata, Rope
from tests.kernels.paged_batches import POISON, Shape, empty_caches, paged_batch
from tests.kernels.triton_device import DEVICE

flash_decoding = pytest.importorskip("mini_infer.kernels.triton.flash_decoding")

CONTEXTS = {
    "first token": [1],
    "two tokens": [2],
    "one piece": [64],
    "one tile and a key": [66],
    "several pieces": [300],
    "padded rows beside others": [1, 130, 1],
    "far apart": [3, 500, 17, 131],
}
SHAPES = [
    Shape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16),
    Shape(num_heads=7, num_kv_heads=1, head_dim=64, block_size=16),
    Shape(num_heads=2, num_kv_heads=2, head_dim=80, block_size=1, interleaved=False),
    Shape(num_heads=6, num_kv_heads=2, head_dim=96, block_size=4),
    Shape(num_heads=2, num_kv_heads=1, head_dim=128, block_size=32),
    Shape(num_heads=20, num_kv_heads=1, head_dim=256, block_size=8),
]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def on_device(meta: AttentionMetadata) -> AttentionMetadata:
    names = ("cu_seqlens_q", "seqlens_k", "block_table", "slot_mapping")
    return replace(meta, **{name: getattr(meta, name).to(DEVICE) for name in names})


class Step:
    """Rows of ``width`` new tokens: old keys and values in the cache, the new slots and all others
    poisoned."""

    attend = staticmethod(flash_decoding.decode_attention)

    def __init__(
        self,
        contexts: Sequence[int],
        shape: Shape,
        dtype: torch.dtype = torch.float32,
        width: int = 1,
    ) -> None:
        batch = paged_batch([width] * len(contexts), contexts, shape)
        heads, num_tokens = shape.num_kv_heads, width * len(contexts)
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
        positions = torch.cat([torch.arange(count - width, count) for count in contexts])
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
        out: Tensor = self.attend(
            self.qkv, self.rope, *self.caches, self.meta, self.scale, window, qk_norm
        )
        assert out.dtype == self.qkv.dtype
        tolerance = 3e-6 if out.dtype == torch.float32 else 1e-2
        close = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(out.double(), expected, **close)
        for cache, correct in zip(self.caches, exact, strict=True):
            torch.testing.assert_close(cache.double(), correct, **close)
        return out


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_every_mix_of_contexts(contexts: list[int], with_norm: bool) -> None:
    Step(contexts, SHAPES[0]).run(with_norm=with_norm)


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("window", [1, 5, 100])
def test_sliding_windows(contexts: list[int], window: int) -> None:
    Step(contexts, SHAPES[0]).run(window)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda s: f"{s.num_heads} heads of {s.head_dim}")
def test_shapes_of_heads_and_blocks(shape: Shape) -> None:
    Step([70, 3, 1], shape).run(with_norm=True)


@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("context", [64, 96, 128, 129, 161, 300])
def test_blocks_as_large_as_a_piece(block_size: int, context: int) -> None:
    """Pieces begin where a part of a block does: none may be left without keys."""
    Step([context], Shape(num_heads=2, num_kv_heads=1, block_size=block_size)).run()


def head_major(cache: Tensor) -> Tensor:
    """The same values where a head's keys of a block are one piece of memory, as on a GPU."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda s: f"blocks of {s.block_size}")
def test_heads_that_lie_apart(shape: Shape) -> None:
    step = Step([300, 3, 1], shape)
    step.caches = head_major(step.caches[0]), head_major(step.caches[1])
    step.run()


def test_half_precision() -> None:
    """Bfloat16, whose products the interpreter gets wrong, is among the GPU's tests."""
    Step([300, 40], SHAPES[1], torch.float16).run(with_norm=True)


def test_rows_of_a_graph_that_was_captured_for_longer_contexts() -> None:
    """The grid is that of 4,096 keys: surplus programs write nothing."""
    step = Step([130, 3], SHAPES[0])
    step.meta = replace(step.meta, max_seqlen_k=4096)
    step.run()


def test_padded_rows_share_a_null_slot() -> None:
    """Rows of context 1 whose blocks and slots are the same one: they see only themselves."""
    step = Step([20, 1, 1], SHAPES[0])
    step.meta.block_table[2] = step.meta.block_table[1]
    step.meta.slot_mapping[2] = step.meta.slot_mapping[1]
    out = flash_decoding.decode_attention(step.qkv, step.rope, *step.caches, step.meta, step.scale)
    values = step.qkv[1:, -2:].repeat_interleave(2, dim=1).flatten(1)
    torch.testing.assert_close(out[1:], values)


def test_empty_caches_are_never_read() -> None:
    shape = SHAPES[0]
    step = Step([1, 1], shape)
    k_cache, v_cache = empty_caches(2, shape)
    step.caches = k_cache.to(DEVICE), v_cache.to(DEVICE)
    assert step.run().abs().max() < POISON / 1000
