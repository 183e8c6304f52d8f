"""Attention of a token and its drafts in one call, against the reference in float64."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.kernels import test_flash_decoding
from tests.kernels.paged_batches import Shape, paged_batch
from tests.kernels.test_flash_decoding import SHAPES, head_major

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


class Step(test_flash_decoding.Step):
    """Rows of ``width`` new tokens behind those that were there ``before``."""

    attend = staticmethod(draft_attention.draft_attention)

    def __init__(
        self, before: Sequence[int], width: int, shape: Shape, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__([count + width for count in before], shape, dtype, width)


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
