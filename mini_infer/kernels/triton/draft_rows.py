"""Behind verification: what a proposer begins with, and where its drafts go."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.speculative_config import MAX_DRAFTS
from mini_infer.kernels.triton.launch import power_of_two, starts_early

TILE = 1024


@triton.jit(do_not_specialize_on_alignment=["first_samples", "num_accepted", "positions"])
def last_samples_kernel(
    first_samples,
    num_accepted,
    token_ids,
    places,
    hidden,
    last_token_ids,
    positions,
    last_hidden,
    size: tl.constexpr,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    """Grid: (R, cdiv(size, tile))."""
    if early:
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sample = tl.load(first_samples + row) + tl.load(num_accepted + row)
    column = part * tile + tl.arange(0, tile)
    values = tl.load(hidden + sample * size + column, mask=column < size)
    tl.store(last_hidden + row * size + column, values, mask=column < size)
    if part == 0:
        tl.store(last_token_ids + row, tl.load(token_ids + sample))
        tl.store(positions + row, tl.load(places + sample))


def last_samples(
    first_samples: Tensor, num_accepted: Tensor, token_ids: Tensor, places: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.last_samples``; ``hidden`` is contiguous."""
    num_rows, size, device = len(first_samples), hidden.shape[1], hidden.device
    last_token_ids, positions = (
        torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2)
    )
    last_hidden = torch.empty(num_rows, size, dtype=hidden.dtype, device=device)
    early = starts_early(device)
    last_samples_kernel[num_rows, triton.cdiv(size, TILE)](
        first_samples,
        num_accepted,
        token_ids,
        places,
        hidden,
        last_token_ids,
        positions,
        last_hidden,
        size=size,
        tile=TILE,
        early=early,
        num_warps=4,
        launch_pdl=early,
    )
    return last_token_ids, positions, last_hidden


@triton.jit(
    do_not_specialize=["num_drafts", "table_stride", "draft_stride"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def write_drafts_kernel(
    token_table,
    slots,
    positions,
    drafts,
    num_drafts,
    table_stride,
    draft_stride,
    most_drafts: tl.constexpr,
    early: tl.constexpr,
):
    """Grid: (R)."""
    if early:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    offset = tl.arange(0, most_drafts)
    exists = offset < num_drafts
    draft = tl.load(drafts + row * draft_stride + offset, mask=exists)
    place = token_table + slot * table_stride + position + 1 + offset
    tl.store(place, draft.to(token_table.dtype.element_ty), mask=exists)


def write_drafts_(token_table: Tensor, slots: Tensor, positions: Tensor, drafts: Tensor) -> None:
    """See ``reference.write_drafts_``."""
    early = starts_early(slots.device)
    drafts = drafts.contiguous()
    write_drafts_kernel[len(slots),](
        token_table,
        slots,
        positions,
        drafts,
        drafts.shape[1],
        token_table.stride(0),
        drafts.stride(0),
        most_drafts=power_of_two(MAX_DRAFTS),
        early=early,
        num_warps=1,
        launch_pdl=early,
    )
