"""Grammars' masks on logits: a bit a token."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


def mask_(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """See ``sampling.mask_``; rows of ``logits`` contiguous, ``rows`` int64."""
    vocab_size = logits.shape[-1]
    mask_kernel[masks.shape[0], triton.cdiv(vocab_size, TILE)](
        logits, logits.stride(0), rows, masks, masks.stride(0), vocab_size, tile=TILE
    )
    return logits


@triton.jit(
    do_not_specialize_on_alignment=["rows_ptr", "masks_ptr"],
)
def mask_kernel(
    logits_ptr, row_stride, rows_ptr, masks_ptr, mask_stride, vocab_size, tile: tl.constexpr
):
    """Stores, and reads no logit. Grid: (masks, tiles of a row)."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    words = tl.program_id(1) * (tile // 32) + tl.arange(0, tile // 32)
    num_words = (vocab_size + 31) // 32
    packed = tl.load(masks_ptr + index * mask_stride + words, mask=words < num_words, other=0)
    bits = tl.arange(0, 32)
    ids = words[:, None] * 32 + bits[None, :]
    forbidden = ((packed[:, None] >> bits[None, :]) & 1) == 0
    infinity = tl.full([tile // 32, 32], float("-inf"), tl.float32)
    tl.store(
        logits_ptr + row * row_stride + ids,
        infinity.to(logits_ptr.dtype.element_ty),
        mask=forbidden & (ids < vocab_size),
    )
