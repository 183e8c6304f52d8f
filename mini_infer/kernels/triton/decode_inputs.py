"""What a decode step reads from the device's tables, gathered by one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.triton.launch import starts_early

TILE = 1024


@triton.jit(
    do_not_specialize=["token_stride", "block_stride", "num_columns"],
    do_not_specialize_on_alignment=["slots", "starts"],
)
def decode_inputs_kernel(
    slots,
    starts,
    token_table,
    block_table,
    token_ids,
    seqlens_k,
    slot_mapping,
    row_blocks,
    token_stride,
    block_stride,
    num_columns,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    """Grid: (R, cdiv(num_columns, tile)). Columns beyond the context are not copied."""
    if early:  # the embedding, which waits at once
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    start = tl.load(starts + row)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    used = (column < num_columns) & (column <= start // block_size)
    blocks = tl.load(block_table + slot * block_stride + column, mask=used)
    tl.store(row_blocks + row.to(tl.int64) * num_columns + column, blocks, mask=used)
    if tl.program_id(1) == 0:
        token = tl.load(token_table + slot * token_stride + start)
        tl.store(token_ids + row, token.to(tl.int64))
        tl.store(seqlens_k + row, start + 1)
        block = tl.load(block_table + slot * block_stride + start // block_size).to(tl.int64)
        tl.store(slot_mapping + row, block * block_size + start % block_size)


def decode_inputs(
    slots: Tensor,
    starts: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.decode_inputs``."""
    num_rows = len(slots)
    token_ids, seqlens_k, slot_mapping = (torch.empty_like(slots) for _ in range(3))
    row_blocks = torch.empty(num_rows, num_columns, dtype=torch.int32, device=slots.device)
    decode_inputs_kernel[num_rows, triton.cdiv(num_columns, TILE)](
        slots,
        starts,
        token_table,
        block_table,
        token_ids,
        seqlens_k,
        slot_mapping,
        row_blocks,
        token_table.stride(0),
        block_table.stride(0),
        num_columns,
        block_size=block_size,
        tile=TILE,
        early=starts_early(slots.device),
        num_warps=4,
    )
    return token_ids, seqlens_k, slot_mapping, row_blocks
