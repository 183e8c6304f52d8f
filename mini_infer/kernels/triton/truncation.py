"""Top-k, top-p and min-p of one row by one program, without a sort of the row.

The tokens that a truncated row keeps are the first of its ranking (logit, then lowest id), as long
as the weight before each stays below a target: with weight 1 a token that is top-k, with its
probability top-p. So both are a search for a place in the ranking, the *cut*.

- Where the set is small, it lies in a few segments of the row (``candidates``).
- Where it may be large, the best noisy token of the *whole* row is tried first: if it is kept, it
  is the best of all that are kept, and this takes one pass to see. (To draw from all and reject is
  FlashInfer's way; under Gumbel noise a rejected draw is not repeated, so then:)
- Otherwise the cut is searched by passes over the row (``row_search``).

Ranks are those of logits, which the temperature's division does not reorder.
"""

import math

import triton
import triton.language as tl

from mini_infer.kernels.triton.candidates import (
    HIGHEST,
    LOWEST,
    best_of_list,
    best_of_segments,
    gather_segments,
    highest_reaching,
    kth_largest,
    list_masses,
    write_places,
)
from mini_infer.kernels.triton.noise import divide, order_key, rank_key, row_keys, token_of
from mini_infer.kernels.triton.row_search import extent, find_cut, mass_from

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST_FINITE = tl.constexpr(-3.4028234663852886e38)
NEAR = tl.constexpr(512)
"""Up to this top-k, candidates are sought in segments."""
TRIED_SEGMENTS = tl.constexpr(256)
"""Segments that top-p alone is tried with."""


@triton.jit
def draw_truncated(
    row_ptr,
    hashes_ptr,
    candidates_ptr,
    places_ptr,
    segment_highest_ptr,
    segment_mass_ptr,
    segment_best_ptr,
    num_segments,
    vocab_size,
    best,
    temperature,
    top_k,
    top_p,
    log_min_p,
    seed,
    position,
    tile: tl.constexpr,
    listed: tl.constexpr,
    segment: tl.constexpr,
    padded_segments: tl.constexpr,
):
    """The rank key of the best noisy token of those that the row keeps.

    ``best`` is that of all its tokens; its score is finite.
    """
    index = tl.arange(0, padded_segments)
    exists = index < num_segments
    highests = tl.load(segment_highest_ptr + index, mask=exists, other=float("-inf"))
    highest = tl.max(highests, 0)
    scale = LOG2_E / temperature
    reciprocal = tl.div_rn(1.0, temperature)
    winner = token_of(best)
    logit = tl.load(row_ptr + winner).to(tl.float32)
    floor = divide(highest, temperature, reciprocal) + log_min_p
    cut = tl.full([], LOWEST, tl.int64)
    is_listed = False
    limits_mass = top_p < float("inf")
    if (top_k > 0) | limits_mass:
        masses = tl.load(segment_mass_ptr + index, mask=exists, other=0.0)
        masses *= tl.where(highests > float("-inf"), tl.exp2((highests - highest) * scale), 0.0)
        mass = tl.sum(masses, 0)
        count = listed + 1
        if (vocab_size <= listed) | (top_k <= tl.minimum(num_segments, NEAR)):
            lowest = tl.full([], LOWEST_FINITE, tl.float32)
            if vocab_size > listed:
                wanted = tl.where(top_k > 0, top_k, tl.minimum(num_segments, TRIED_SEGMENTS))
                lowest = tl.maximum(lowest, kth_largest(highests, exists, wanted))
            chosen = write_places(places_ptr, exists & (highests >= lowest), padded_segments)
            count = gather_segments(
                row_ptr,
                places_ptr,
                candidates_ptr,
                chosen,
                vocab_size,
                lowest,
                segment,
                tile,
                listed,
            )
        if count <= listed:
            keys = tl.load(candidates_ptr + tl.arange(0, listed))
            weights = list_masses(keys, highest, scale)
            least = tl.min(tl.where(keys > LOWEST, keys, HIGHEST), 0)
            end = (order_key(highest).to(tl.int64) + 1) << 32
            is_listed = True
            if top_k > 0:
                ones = tl.where(keys > LOWEST, 1.0, 0.0)
                cut = highest_reaching(
                    keys, ones, least, end, top_k.to(tl.float32), highest, scale, False
                )
                least = cut
                mass = tl.sum(tl.where(keys >= cut, weights, 0.0), 0)
            else:
                # Without top-k the list may be too short.
                is_listed = (tl.sum(weights, 0) >= top_p * mass) | (vocab_size <= listed)
            if is_listed & limits_mass:
                cut = highest_reaching(
                    keys, weights, least, end, top_p * mass, highest, scale, True
                )
        if not is_listed:
            least = rank_key(logit, winner)
            if top_k > 0:
                finite, lowest = extent(row_ptr, vocab_size, tile)
                least = rank_key(lowest, vocab_size)
                if top_k < finite:
                    least = find_cut(
                        row_ptr,
                        candidates_ptr,
                        vocab_size,
                        least,
                        finite,
                        highest,
                        scale,
                        top_k.to(tl.float32),
                        tile,
                        listed,
                        False,
                    )
                cut = least
            if limits_mass:
                # Down to the row's best, or to the last of top-k.
                down_to = mass_from(row_ptr, vocab_size, least, highest, scale, tile)
                if top_k > 0:
                    mass = down_to
                if (top_k > 0) | (down_to - tl.exp2((logit - highest) * scale) >= top_p * mass):
                    cut = find_cut(
                        row_ptr,
                        candidates_ptr,
                        vocab_size,
                        least,
                        down_to,
                        highest,
                        scale,
                        top_p * mass,
                        tile,
                        listed,
                        True,
                    )
    kept = rank_key(logit, winner) >= cut
    if not (kept & (divide(logit, temperature, reciprocal) >= floor)):
        key0, key1 = row_keys(seed, position)
        if is_listed:
            best = best_of_list(
                candidates_ptr, hashes_ptr, cut, floor, temperature, key0, key1, listed
            )
        else:
            bests = tl.load(segment_best_ptr + index, mask=exists, other=LOWEST)
            best = best_of_segments(
                row_ptr,
                hashes_ptr,
                places_ptr,
                bests,
                highests,
                vocab_size,
                cut,
                floor,
                temperature,
                key0,
                key1,
                segment,
                tile,
                padded_segments,
            )
    return best
