"""What a step of equally many drafts a row reads from the device's tables, by one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.speculative_config import MAX_DRAFTS
from mini_infer.kernels.reference import VerifyInputs
from mini_infer.kernels.triton.launch import power_of_two, starts_early

TILE = 1024


@triton.jit(
    do_not_specialize=["width", "null_block", "token_stride", "block_stride", "num_columns"],
    do_not_specialize_on_alignment=["slots", "starts", "positions"],
)
def verify_inputs_kernel(
    slots,
    starts,
    token_table,
    block_table,
    last_positions,
    kv_limits,
    token_ids,
    positions,
    sampled_positions,
    token_slots,
    slot_mapping,
    first_positions,
    seqlens_k,
    row_blocks,
    width,
    null_block,
    token_stride,
    block_stride,
    num_columns,
    block_size: tl.constexpr,
    padded_width: tl.constexpr,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    """Grid: (R, cdiv(num_columns, tile)). Columns beyond the context are not copied."""
    if early:  # the embedding, which waits at once
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    start = tl.load(starts + row)
    if start < 0:
        start = tl.load(last_positions + slot)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    used = (column < num_columns) & (column <= (start + width - 1) // block_size)
    blocks = tl.load(block_table + slot * block_stride + column, mask=used)
    tl.store(row_blocks + row.to(tl.int64) * num_columns + column, blocks, mask=used)
    if tl.program_id(1) == 0:
        limit = tl.load(kv_limits + slot)
        offset = tl.arange(0, padded_width)
        exists = offset < width
        position = start + offset
        token = tl.load(token_table + slot * token_stride + position, mask=exists)
        has_room = exists & (position < limit)
        entry = block_table + slot * block_stride + position // block_size
        block = tl.load(entry, mask=has_room, other=null_block).to(tl.int64)
        place = row * width + offset
        tl.store(token_ids + place, token.to(tl.int64), mask=exists)
        tl.store(positions + place, position, mask=exists)
        tl.store(sampled_positions + place, position + 1, mask=exists)
        tl.store(token_slots + place, slot + tl.zeros_like(offset), mask=exists)
        tl.store(slot_mapping + place, block * block_size + position % block_size, mask=exists)
        tl.store(first_positions + row, start)
        tl.store(seqlens_k + row, start + width)


def verify_inputs(
    slots: Tensor,
    starts: Tensor,
    width: int,
    token_table: Tensor,
    block_table: Tensor,
    last_positions: Tensor,
    kv_limits: Tensor,
    block_size: int,
    num_columns: int,
    null_block: int,
) -> VerifyInputs:
    """See ``reference.verify_inputs``."""
    num_rows, device = len(slots), slots.device
    # Each a tensor of its own, so that all addresses are aligned whatever the step.
    token_ids, positions, sampled_positions, token_slots, slot_mapping = (
        torch.empty(num_rows * width, dtype=torch.int64, device=device) for _ in range(5)
    )
    first_positions, seqlens_k = (
        torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2)
    )
    row_blocks = torch.empty(num_rows, num_columns, dtype=torch.int32, device=device)
    verify_inputs_kernel[num_rows, triton.cdiv(num_columns, TILE)](
        slots,
        starts,
        token_table,
        block_table,
        last_positions,
        kv_limits,
        token_ids,
        positions,
        sampled_positions,
        token_slots,
        slot_mapping,
        first_positions,
        seqlens_k,
        row_blocks,
        width,
        null_block,
        token_table.stride(0),
        block_table.stride(0),
        num_columns,
        block_size=block_size,
        padded_width=power_of_two(1 + MAX_DRAFTS),
        tile=TILE,
        early=starts_early(device),
        num_warps=4,
    )
    return VerifyInputs(
        token_ids,
        positions,
        sampled_positions,
        token_slots,
        slot_mapping,
        first_positions,
        seqlens_k,
        row_blocks,
    )
