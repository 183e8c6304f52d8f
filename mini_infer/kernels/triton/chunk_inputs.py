"""What a step with chunks reads from the device's tables, gathered by one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 256
"""Tokens of a program."""
COLUMNS = 1024


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "halvings",
        "token_stride",
        "block_stride",
        "num_columns",
    ],
    do_not_specialize_on_alignment=["slots", "starts", "cu_seqlens_q", "positions"],
)
def chunk_inputs_kernel(
    slots,
    starts,
    cu_seqlens_q,
    token_table,
    block_table,
    token_ids,
    positions,
    seqlens_k,
    slot_mapping,
    row_blocks,
    num_rows,
    num_tokens,
    halvings,
    token_stride,
    block_stride,
    num_columns,
    block_size: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Grid: (R + cdiv(T, tile_tokens)): a program a row, then those of the tokens.

    A token's row is the number of rows that end at it or before: found by ``halvings`` of all rows.
    """
    row = tl.program_id(0)
    if row < num_rows:
        slot = tl.load(slots + row)
        start = tl.load(starts + row)
        length = tl.load(cu_seqlens_q + row + 1) - tl.load(cu_seqlens_q + row)
        tl.store(seqlens_k + row, start + length)
        end = tl.minimum(tl.cdiv(start + length, block_size), num_columns)
        target = row_blocks + row.to(tl.int64) * num_columns
        for first in range(0, end, tile_columns):
            column = first + tl.arange(0, tile_columns)
            blocks = tl.load(block_table + slot * block_stride + column, mask=column < end)
            tl.store(target + column, blocks, mask=column < end)
    else:
        token = (row - num_rows) * tile_tokens + tl.arange(0, tile_tokens)
        exists = token < num_tokens
        low = tl.zeros([tile_tokens], tl.int32)
        high = low + num_rows - 1  # the last row, if no other
        for _ in range(halvings):
            middle = (low + high) // 2
            is_later = tl.load(cu_seqlens_q + middle + 1) <= token
            low = tl.where(is_later & (low < high), middle + 1, low)
            high = tl.where(is_later, high, middle)
        position = tl.load(starts + low) + token - tl.load(cu_seqlens_q + low)
        owner = tl.load(slots + low)
        place = token_table + owner * token_stride + position
        tl.store(token_ids + token, tl.load(place, mask=exists, other=0).to(tl.int64), mask=exists)
        tl.store(positions + token, position, mask=exists)
        entry = block_table + owner * block_stride + position // block_size
        block = tl.load(entry, mask=exists, other=0).to(tl.int64)
        tl.store(slot_mapping + token, block * block_size + position % block_size, mask=exists)


def chunk_inputs(
    slots: Tensor,
    starts: Tensor,
    cu_seqlens_q: Tensor,
    num_tokens: int,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.chunk_inputs``."""
    num_rows, device = len(slots), slots.device
    token_ids, positions, slot_mapping = (
        torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3)
    )
    seqlens_k = torch.empty(num_rows, dtype=torch.int64, device=device)
    row_blocks = torch.empty(num_rows, num_columns, dtype=torch.int32, device=device)
    chunk_inputs_kernel[num_rows + triton.cdiv(num_tokens, TOKENS),](
        slots,
        starts,
        cu_seqlens_q,
        token_table,
        block_table,
        token_ids,
        positions,
        seqlens_k,
        slot_mapping,
        row_blocks,
        num_rows,
        num_tokens,
        (num_rows - 1).bit_length(),
        token_table.stride(0),
        block_table.stride(0),
        num_columns,
        block_size=block_size,
        tile_tokens=TOKENS,
        tile_columns=COLUMNS,
        num_warps=4,
    )
    return token_ids, positions, seqlens_k, slot_mapping, row_blocks
