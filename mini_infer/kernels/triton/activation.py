"""The gate of SwiGLU (arXiv 2002.05202) in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.triton.launch import starts_early

TILE = 1024


@triton.jit
def silu_and_mul_kernel(
    gate_up_ptr, out_ptr, size: tl.constexpr, tile: tl.constexpr, early: tl.constexpr
):
    """``gate_up [T, 2 * size]`` -> ``out [T, size]``. Grid: (T, cdiv(size, tile))."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < size
    source = gate_up_ptr + row * (2 * size) + column
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + size, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gate = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded as the reference does
    out = gate.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * size + column, out.to(gate.dtype), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_and_mul``."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    num_rows = gate_up.numel() // (2 * size)
    early = starts_early(gate_up.device)
    silu_and_mul_kernel[num_rows, triton.cdiv(size, TILE)](
        gate_up, out, size=size, tile=TILE, early=early, num_warps=4, launch_pdl=early
    )
    return out
