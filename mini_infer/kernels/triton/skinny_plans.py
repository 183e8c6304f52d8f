"""Which kernel multiplies few rows of activations with a weight, and how it divides the product."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mini_infer.kernels.triton.launch import power_of_two

# Measured on an H200 with the products of Qwen2.5-7B, Qwen2.5-1.5B and Qwen3-0.6B in bfloat16
# (benchmarks/gpu_products.py): where a library's product, its norm and its gate take longer.
VECTOR_ROWS = 2
"""Up to here every product is ours; in float32 there is no more."""
NARROW_VECTOR_ROWS = 4
LONG_ROWS = 8
"""Up to here products of few long lines are ours, too."""
MAX_ROWS = 32
WIDE = 16384
"""Lines of weights from which on there are waves of programs, and no start or end shows."""
SHORT = 3072
"""Values a line up to which a library's product is mostly start and end."""
FUSED_NORM_ROWS = 2
"""Up to so many rows, each program of plain threads norms the activations for itself."""
FRAGMENT_LINES = 8
FRAGMENT_K = 32
MAX_FRAGMENTS = 54
"""Tiles of eight lines or rows and 32 values, 16 bytes a thread, that a warp's registers hold."""
MAX_ROW_BYTES = 20 << 20
"""Of activations, that all programs together read from the cache before it shows."""
FRAGMENT_NORM_DTYPES = {torch.bfloat16}
"""Whose range holds activations times the weight of their norm, before these are scaled."""
PROGRAMS = 256
"""Two for each processor, about."""
MIN_TILE_ROWS = 8
MAX_PER_SM = 4
"""Programs that share a processor's memory: beyond, there are waves."""


class VectorPlan(NamedTuple):
    """How ``vector_kernel`` divides a product."""

    lines: int
    tile_k: int
    depth: int
    num_warps: int


class FragmentPlan(NamedTuple):
    """How ``fragment_kernel`` divides a product."""

    parts: int


class TilePlan(NamedTuple):
    """How ``tile_kernel`` divides a product."""

    lines: int
    tile_k: int
    parts: int
    held: int
    splits: int
    stages: int
    num_warps: int


def is_skinny(num_rows: int, weight: Tensor) -> bool:
    """Are these kernels faster than the library for ``num_rows`` and this ``weight [N, K]``?"""
    lines, size = weight.shape
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if size % 16 != 0 or not weight.is_contiguous() or num_rows == 0:
        return False
    if weight.dtype == torch.float32:
        return num_rows <= VECTOR_ROWS
    return num_rows <= (MAX_ROWS if lines >= WIDE or size <= SHORT else LONG_ROWS)


def plan(
    num_rows: int, weight: Tensor, norms: bool = False
) -> VectorPlan | FragmentPlan | TilePlan:
    """The measured best division of ``num_rows`` rows, after a norm or not, times ``weight``."""
    lines, size = weight.shape
    if weight.element_size() == 2 and num_rows > 1:
        parts = _fragment_parts(num_rows, lines, size, norms)
        if parts == 1 or (parts is not None and num_rows > VECTOR_ROWS):  # for two, plain threads
            return FragmentPlan(parts)
    wide = lines >= WIDE
    if num_rows <= VECTOR_ROWS or (num_rows <= NARROW_VECTOR_ROWS and size <= SHORT and not wide):
        return _vector_plan(num_rows, lines, size)
    if wide:  # waves of programs: nothing to hold while a predecessor ends
        few = num_rows <= 8
        return TilePlan(16, 64, 4, 0, 1, 3, 4) if few else TilePlan(64, 64, 1, 0, 1, 6, 4)
    if num_rows > 8:
        tile_lines = 16 if num_rows <= 16 else 32
        fill = min(8, size // 256, PROGRAMS * tile_lines // lines)  # splits, if tiles are few
        splits = 1 << (max(fill, 1).bit_length() - 1)
        if num_rows <= 16:
            return TilePlan(tile_lines, 128, 2, 0, splits, 5, 2)
        return TilePlan(tile_lines, 128, 1, 0, splits, 6, 4)
    tiles = triton.cdiv(lines, 16)
    splits = max(1, min(PROGRAMS // tiles, size // 1024)) if size > 2048 else 1
    held = _held(size // splits, 4) if size % (16 * splits) == 0 else 0
    return TilePlan(16, 64, 4, held, splits, 5, 4)


def _fragment_parts(num_rows: int, lines: int, size: int, norms: bool) -> int | None:
    """The fewest warps that hold all of eight lines and of the rows: each costs time."""
    rows = tile_rows(num_rows)
    if triton.cdiv(lines, FRAGMENT_LINES) * rows * size * 2 > MAX_ROW_BYTES:
        return None
    tiles = rows // MIN_TILE_ROWS + (2 if norms else 1)
    for parts in (1, 2, 4, 8):
        if triton.cdiv(size, FRAGMENT_K * parts) * tiles <= MAX_FRAGMENTS:
            return parts
    return None


def tile_rows(num_rows: int) -> int:
    """The rows of a tensor core's tile that ``num_rows`` of activations take."""
    return max(MIN_TILE_ROWS, power_of_two(num_rows))


def _held(span: int, parts: int) -> int:
    """Values of a span that are asked for early: a power of two a part, which a dot can take."""
    each = 1 << (min(span // parts, 256).bit_length() - 1)
    return each * parts if each >= 16 else 0


def _vector_plan(num_rows: int, lines: int, size: int) -> VectorPlan:
    """Few programs take more of each line at once, many rows less: they need the registers."""
    if lines <= 2048 and size >= 2048:
        return VectorPlan(2 if num_rows == 1 else 4, 2048, 2, 8)
    if num_rows == 1 and (lines >= WIDE or size > 8192) and size >= 2048:
        return VectorPlan(4, 2048, 2, 8)
    if lines <= 2048 or size > 8192 or (num_rows == 1 and size >= 2048):
        return VectorPlan(4, 1024, 2, 4)
    return VectorPlan(4, 512, 4, 2)
