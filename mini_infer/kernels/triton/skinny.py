"""Matrix products with few rows of activations, as a decode step has: they mostly read weights.

A library's kernels leave part of the bandwidth to launches, to tails, and to the norms, gates and
sums between them. Here each product takes those along, and starts while its predecessor still runs
(programmatic dependent launch): its first weights are on their way before its activations exist.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from mini_infer.kernels.reference import Norm
from mini_infer.kernels.triton.launch import num_sms, power_of_two, shared_memory, starts_early
from mini_infer.kernels.triton.norm import rms_norm
from mini_infer.kernels.triton.skinny_fragments import fragment_kernel
from mini_infer.kernels.triton.skinny_plans import (
    FRAGMENT_LINES,
    FRAGMENT_NORM_DTYPES,
    FUSED_NORM_ROWS,
    MAX_PER_SM,
    PROGRAMS,
    FragmentPlan,
    TilePlan,
    VectorPlan,
    plan,
    tile_rows,
)
from mini_infer.kernels.triton.skinny_tiles import tile_kernel
from mini_infer.kernels.triton.skinny_vector import vector_kernel


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.linear``; writes ``out [T, N]``, contiguous, where it is given."""
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
    chosen = plan(num_rows, weight, norm is not None)
    if isinstance(chosen, FragmentPlan):
        fuses = x.dtype in FRAGMENT_NORM_DTYPES
    else:
        fuses = isinstance(chosen, VectorPlan) and num_rows <= FUSED_NORM_ROWS
    if norm is not None and not fuses:
        x, norm = rms_norm(x, *norm), None
    x = x.contiguous()
    early = starts_early(x.device)
    common: dict[str, Any] = {
        "size": size,
        "has_bias": bias is not None,
        "adds": adds,
        "gated": gated,
        "early": early,
        "launch_pdl": early,
    }
    bias = x if bias is None else bias  # not read
    if isinstance(chosen, TilePlan):
        return _multiply_tiles(chosen, out, x, weight, bias, common)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    arguments = x, weight, bias, norm_weight, out, num_rows, out.shape[1], eps
    common["has_norm"] = norm is not None
    if isinstance(chosen, FragmentPlan):
        fragment_kernel[triton.cdiv(weight.shape[0], FRAGMENT_LINES),](
            *arguments,
            tile_m=tile_rows(num_rows),
            parts=chosen.parts,
            num_warps=chosen.parts,
            **common,
        )
        return out
    vector_kernel[triton.cdiv(weight.shape[0], chosen.lines),](
        *arguments,
        tile_m=power_of_two(num_rows),
        lines=chosen.lines,
        tile_k=chosen.tile_k,
        ahead=(triton.cdiv(size, chosen.tile_k) - 1) % chosen.depth + 1,
        depth=chosen.depth,
        num_warps=chosen.num_warps,
        **common,
    )
    return out


def _multiply_tiles(
    chosen: TilePlan, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, common: dict[str, Any]
) -> Tensor:
    num_rows, size = x.shape
    tile_m = tile_rows(num_rows)
    tiles = triton.cdiv(weight.shape[0], chosen.lines)
    per_sm = min(triton.cdiv(tiles * chosen.splits, num_sms(x.device)), MAX_PER_SM)
    room = shared_memory(x.device) // per_sm
    line_bytes, row_bytes = chosen.lines * x.element_size(), tile_m * x.element_size()
    held = chosen.held
    while held * (line_bytes + row_bytes) > room:
        held //= 2
    step_bytes = chosen.parts * chosen.tile_k * (line_bytes + row_bytes)
    buffers = (room - held * line_bytes) // step_bytes
    steps = triton.cdiv(size // chosen.splits - held, chosen.parts * chosen.tile_k)
    partial, count = x, x  # not used
    if chosen.splits > 1:
        shape = (tiles, chosen.splits, tile_m, chosen.lines)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        count = arrivals(x.device)
    tile_kernel[tiles, chosen.splits](
        x,
        weight,
        bias,
        out,
        partial,
        count,
        num_rows,
        out.shape[1],
        tile_m=tile_m,
        lines=chosen.lines,
        tile_k=chosen.tile_k,
        parts=chosen.parts,
        held=held,
        splits=chosen.splits,
        stages=max(1, min(chosen.stages, buffers + 1, steps + 1)),
        num_warps=chosen.num_warps,
        **common,
    )
    return out


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """How many splits of each tile have arrived: zero between kernels, so allocated once."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
