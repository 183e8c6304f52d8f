"""Log-probabilities of chosen and of the likeliest tokens, without a copy of the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.triton.candidates import (
    LOWEST,
    gather_segments,
    kth_largest,
    write_places,
)
from mini_infer.kernels.triton.launch import power_of_two
from mini_infer.kernels.triton.noise import float_of, rank_key, token_of

TILE = 4096
SEGMENT = 128
LISTED = 1024


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of ``token_ids [R]`` and the ``num_top`` likeliest under ``logits [R, V]``.

    Args:
        logits: any float dtype, rows contiguous.
        token_ids: int64.
        num_top: at most V.

    Returns:
        Log-probabilities ``[R]`` float32; ranks ``[R]`` int64, 1 where no logit is larger; ids
        ``[R, num_top]`` int64 of the likeliest, ties by id; their log-probabilities.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(num_rows, num_top, dtype=torch.float32, device=device)
    num_segments = triton.cdiv(vocab_size, SEGMENT)
    padded_segments = power_of_two(num_segments)
    highests = torch.empty(num_rows, num_segments, dtype=torch.float32, device=device)
    candidates = torch.empty(num_rows, LISTED, dtype=torch.int64, device=device)
    places = torch.empty(num_rows, padded_segments, dtype=torch.int32, device=device)
    if num_rows:
        logprobs_kernel[num_rows,](
            logits,
            logits.stride(0),
            token_ids,
            logprobs,
            ranks,
            top_ids,
            top_logprobs,
            highests,
            candidates,
            places,
            vocab_size,
            num_top,
            num_segments,
            tile=TILE,
            segment=SEGMENT,
            padded_segments=padded_segments,
            listed=LISTED,
            num_warps=16,
        )
    return logprobs, ranks, top_ids, top_logprobs


@triton.jit(
    do_not_specialize=["num_top", "num_segments"],
    do_not_specialize_on_alignment=["token_ids_ptr"],
)
def logprobs_kernel(
    logits_ptr,
    row_stride,
    token_ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    highests_ptr,
    candidates_ptr,
    places_ptr,
    vocab_size,
    num_top,
    num_segments,
    tile: tl.constexpr,
    segment: tl.constexpr,
    padded_segments: tl.constexpr,
    listed: tl.constexpr,
):
    """Two passes over a row, the second from the cache, then its likeliest. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    highests_ptr += row * num_segments
    candidates_ptr += row * listed
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    lanes = tl.arange(0, tile)
    in_tile = tl.arange(0, tile // segment)
    offset = in_tile[:, None] * segment + tl.arange(0, segment)[None, :]
    highest = tl.full([tile // segment], float("-inf"), tl.float32)
    for start in range(0, vocab_size, tile):
        ids = start + offset
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        highest_in = tl.max(x, 1)
        index = start // segment + in_tile
        tl.store(highests_ptr + index, highest_in, mask=index < num_segments)
        highest = tl.maximum(highest, highest_in)
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

    if num_top > 0:
        tl.debug_barrier()
        index = tl.arange(0, padded_segments)
        exists = index < num_segments
        highests = tl.load(highests_ptr + index, mask=exists, other=float("-inf"))
        lowest = kth_largest(highests, exists, tl.minimum(num_top, num_segments))
        places_ptr += row * padded_segments
        count = write_places(places_ptr, exists & (highests >= lowest), padded_segments)
        count = gather_segments(
            row_ptr, places_ptr, candidates_ptr, count, vocab_size, lowest, segment, tile, listed
        )
        top_ids_ptr += row * num_top
        top_logprobs_ptr += row * num_top
        if (count >= num_top) & (count <= listed):
            keys = tl.load(candidates_ptr + tl.arange(0, listed))
            last = tl.max(keys, 0)
            for place in range(num_top):
                write_top(top_ids_ptr + place, top_logprobs_ptr + place, last, log_sum)
                last = tl.max(tl.where(keys < last, keys, LOWEST), 0)
        else:
            # Few segments, or a thousand ties: a pass for each.
            last = tl.full([], 2**63 - 1, tl.int64)
            for place in range(num_top):
                best = tl.full([tile], LOWEST, tl.int64)
                for start in range(0, vocab_size, tile):
                    ids = start + lanes
                    x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
                    keys = rank_key(x, ids)
                    best = tl.maximum(
                        best, tl.where((keys < last) & (ids < vocab_size), keys, LOWEST)
                    )
                last = tl.max(best, 0)
                write_top(top_ids_ptr + place, top_logprobs_ptr + place, last, log_sum)


@triton.jit
def write_top(id_ptr, logprob_ptr, key, log_sum):
    """Writes the token of a rank key and its log-probability."""
    token_id = token_of(key)
    logit = float_of((key >> 32).to(tl.int32))
    tl.store(id_ptr, token_id)
    tl.store(logprob_ptr, logit - log_sum)
