"""Root-mean-square norm (arXiv 1910.07467): where a product does not take it along."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.triton.launch import starts_early

VALUES_PER_PROGRAM = 2048
"""Short rows (heads, in QK norm) share a program."""


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_outer_stride,
    x_inner_stride,
    eps,
    inner_rows: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    tile_rows: tl.constexpr,
    early: tl.constexpr,
):
    """Rows ``[N, size]``; ``inner_rows`` of them lie ``x_inner_stride`` apart in an outer one."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, padded_size)
    inside = (row[:, None] < num_rows) & (column[None, :] < size)
    outer = (row // inner_rows).to(tl.int64) * x_outer_stride
    source = outer + row % inner_rows * x_inner_stride
    target = row.to(tl.int64)[:, None] * size + column[None, :]
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0)
    if early:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + source[:, None] + column[None, :], mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)
    normed = (wide * scale[:, None]).to(x.dtype).to(tl.float32)  # rounded as the reference does
    out = normed * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + target, out.to(x.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``: ``x [T, size]`` or ``[T, H, size]``, rows contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    num_rows = x.numel() // size
    padded = triton.next_power_of_2(size)
    tile_rows = max(1, VALUES_PER_PROGRAM // padded)
    early = starts_early(x.device)
    norm_kernel[triton.cdiv(num_rows, tile_rows),](
        x,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(-2),
        eps,
        inner_rows=x.shape[1] if x.dim() == 3 else 1,
        size=size,
        padded_size=padded,
        tile_rows=tile_rows,
        early=early,
        num_warps=min(16, max(4, padded // 512)),
        launch_pdl=early,
    )
    return out
