"""Matrix products with few rows of activations, as a decode step has: they mostly read weights.

A library's kernels leave part of the bandwidth to launches, to tails, and to the norms, gates and
sums between them. Here each product takes those along, and starts while its predecessor still runs
(programmatic dependent launch): it asks for its first weights before it waits for its activations.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mini_infer.kernels.reference import Norm
from mini_infer.kernels.triton.launch import power_of_two, shared_memory, starts_early
from mini_infer.kernels.triton.norm import rms_norm
from mini_infer.kernels.triton.skinny_tiles import tile_kernel
from mini_infer.kernels.triton.skinny_vector import vector_kernel

MAX_ROWS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 1}
"""Per dtype, up to how many rows these kernels take."""
MAX_TILES = 1 << 16
FUSED_NORM_ROWS = 1


class VectorPlan(NamedTuple):
    """How ``vector_kernel`` divides a product."""

    lines: int
    tile_k: int
    num_warps: int


class TilePlan(NamedTuple):
    """How ``tile_kernel`` divides a product."""

    tile_n: int
    tile_k: int
    parts: int
    splits: int
    stages: int
    ahead: int
    num_warps: int


def is_skinny(num_rows: int, weight: Tensor) -> bool:
    """Are these kernels faster than the library for ``num_rows`` and this ``weight [N, K]``?"""
    return (
        0 < num_rows <= MAX_ROWS.get(weight.dtype, 0)
        and weight.shape[1] % 16 == 0
        and weight.is_contiguous()
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.linear``; ``out [M, N]``, contiguous, is where to put it."""
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return _multiply(out, x, weight, bias, norm, adds=False, gated=False)


def add_linear_(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``reference.add_linear_``: one rounding of the whole sum."""
    return _multiply(residual, x, weight, bias, None, adds=True, gated=False)


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
) -> Tensor:
    """See ``reference.gated_linear``: the products reach the gate in float32."""
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    return _multiply(out, x, weight, bias, norm, adds=False, gated=True)


def plan(num_rows: int, num_outputs: int, size: int, gated: bool) -> VectorPlan | TilePlan:
    """The measured best division of a product ``[num_rows, size] x [num_outputs, size].T``."""
    if num_rows == 1:
        return VectorPlan(4, 1024, 4)
    if num_rows <= 16:
        return TilePlan(8 if gated else 16, 128, 4, 1, 3, 0, 4)
    tile_n = 32 if gated else 64
    splits = max(1, min(8, 132 * 2 * tile_n // num_outputs))
    return TilePlan(tile_n, 128, 1, splits, 4, 4, 4)


def _multiply(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    *,
    adds: bool,
    gated: bool,
) -> Tensor:
    num_rows, size = x.shape
    num_outputs = out.shape[1]
    chosen = plan(num_rows, num_outputs, size, gated)
    if norm is not None and num_rows > FUSED_NORM_ROWS:
        x, norm = rms_norm(x, *norm), None
    x = x.contiguous()
    early = starts_early(x.device)
    weight_of_norm, eps = norm if norm is not None else (x, 0.0)
    flags = {
        "has_bias": bias is not None,
        "has_norm": norm is not None,
        "adds": adds,
        "gated": gated,
        "early": early,
        "launch_pdl": early,
    }
    bias = x if bias is None else bias
    if isinstance(chosen, VectorPlan):
        tiles = triton.cdiv(num_outputs, chosen.lines // 2 if gated else chosen.lines)
        vector_kernel[tiles,](
            x,
            weight,
            bias,
            weight_of_norm,
            out,
            num_rows,
            num_outputs,
            eps,
            size=size,
            tile_m=power_of_two(num_rows),
            lines=chosen.lines,
            tile_k=chosen.tile_k,
            num_warps=chosen.num_warps,
            **flags,
        )
        return out
    tiles = triton.cdiv(num_outputs, chosen.tile_n)
    tile_m = max(8, power_of_two(num_rows))
    lines = chosen.tile_n * (2 if gated else 1)
    stage = (tile_m + lines) * chosen.parts * chosen.tile_k * x.element_size()
    partial, count = x, x
    if chosen.splits > 1:
        shape = (tiles, chosen.splits, tile_m, lines)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        count = arrivals(x.device)
    tile_kernel[tiles, chosen.splits](
        x,
        weight,
        bias,
        weight_of_norm,
        out,
        partial,
        count,
        weight,
        num_rows,
        num_outputs,
        eps,
        chosen.ahead,
        0,
        0,
        size=size,
        tile_m=tile_m,
        tile_n=chosen.tile_n,
        tile_k=chosen.tile_k,
        parts=chosen.parts,
        splits=chosen.splits,
        stages=min(chosen.stages, shared_memory(x.device) // stage),
        num_warps=chosen.num_warps,
        **flags,
    )
    return out


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """How many splits of each tile have arrived: zero between kernels, so allocated once."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
