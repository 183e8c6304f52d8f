"""Verification of drafts: which of them are what the target model sampled itself."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.speculative_config import MAX_DRAFTS
from mini_infer.kernels.triton.launch import power_of_two, starts_early


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["token_ids", "first_samples", "num_drafts", "slots", "starts"],
)
def accept_drafts_kernel(
    token_ids,
    first_samples,
    num_drafts,
    slots,
    starts,
    token_table,
    last_positions,
    num_accepted,
    table_stride,
    most_drafts: tl.constexpr,
    early: tl.constexpr,
):
    """Grid: (R)."""
    if early:  # for the samples
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    first, count = tl.load(first_samples + row), tl.load(num_drafts + row)
    slot, start = tl.load(slots + row), tl.load(starts + row)
    offset = tl.arange(0, most_drafts)
    is_draft = offset < count
    place = token_table + slot * table_stride + start
    draft = tl.load(place + offset, mask=is_draft, other=0).to(tl.int64)
    sample = tl.load(token_ids + first + offset, mask=is_draft, other=0)
    # The first that differs, or else the end.
    accepted = tl.min(tl.where(is_draft & (draft != sample), offset, count), 0)
    # What the other drafts of the row are has been read, by all threads: the minimum needs them.
    last = tl.load(token_ids + first + accepted)
    tl.store(place + accepted, last.to(token_table.dtype.element_ty))
    tl.store(last_positions + slot, start + accepted)
    tl.store(num_accepted + row, accepted)


def accept_drafts_(
    token_ids: Tensor,
    first_samples: Tensor,
    num_drafts: Tensor,
    slots: Tensor,
    starts: Tensor,
    token_table: Tensor,
    last_positions: Tensor,
) -> Tensor:
    """See ``reference.accept_drafts_``."""
    num_rows, device = len(slots), slots.device
    num_accepted = torch.empty(num_rows, dtype=torch.int64, device=device)
    early = starts_early(device)
    accept_drafts_kernel[num_rows,](
        token_ids,
        first_samples,
        num_drafts,
        slots,
        starts,
        token_table,
        last_positions,
        num_accepted,
        token_table.stride(0),
        most_drafts=power_of_two(MAX_DRAFTS),
        early=early,
        num_warps=1,
        launch_pdl=early,
    )
    return num_accepted
