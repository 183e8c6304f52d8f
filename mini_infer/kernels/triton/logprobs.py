"""Log-probability and rank of one token a row, without a copy of the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


def token_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``token_ids [R]`` under ``logits [R, V]`` of any float dtype, rows contiguous.

    Returns:
        Log-probabilities ``[R]`` float32; ranks ``[R]`` int64, 1 where no logit is larger; and the
        logarithms of the rows' sums of exponentials ``[R]`` float32.
    """
    num_rows, vocab_size = logits.shape
    logprobs, log_sums = (
        torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        logprobs_kernel[num_rows,](
            logits,
            logits.stride(0),
            token_ids,
            logprobs,
            ranks,
            log_sums,
            vocab_size,
            tile=TILE,
            num_warps=16,
        )
    return logprobs, ranks, log_sums


@triton.jit
def logprobs_kernel(
    logits_ptr,
    row_stride,
    token_ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    log_sums_ptr,
    vocab_size,
    tile: tl.constexpr,
):
    """Two passes over a row, the second from the cache. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    lanes = tl.arange(0, tile)
    highest = tl.full([tile], float("-inf"), tl.float32)
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(highest, 0)
    total = tl.zeros([tile], tl.float32)
    larger = tl.zeros([tile], tl.int32)
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - largest)
        larger += (x > chosen).to(tl.int32)
    log_sum = largest + tl.log(tl.sum(total, 0))
    tl.store(logprobs_ptr + row, chosen - log_sum)
    tl.store(ranks_ptr + row, tl.sum(larger, 0).to(tl.int64) + 1)
    tl.store(log_sums_ptr + row, log_sum)
