"""Rows of the embedding table: a step's first tensor."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.triton.launch import power_of_two, starts_early

TILE = 4096


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def embedding_kernel(
    token_ids, table, out, size: tl.constexpr, tile: tl.constexpr, early: tl.constexpr
):
    """``out [T, size]``. Grid: (T, cdiv(size, tile)).

    Kernels after it read before they wait what those before it wrote, the step's inputs. So here
    the wait comes first, and lets the next kernel start only then.
    """
    if early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    token_id = tl.load(token_ids + row).to(tl.int64)
    values = tl.load(table + token_id * size + column, mask=column < size)
    tl.store(out + row * size + column, values, mask=column < size)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """See ``reference.embedding``; the table is contiguous."""
    num_tokens, size = len(token_ids), table.shape[1]
    out = torch.empty(num_tokens, size, dtype=table.dtype, device=table.device)
    tile = min(TILE, power_of_two(size))
    early = starts_early(table.device)
    embedding_kernel[num_tokens, triton.cdiv(size, tile)](
        token_ids, table, out, size=size, tile=tile, early=early, num_warps=4, launch_pdl=early
    )
    return out
