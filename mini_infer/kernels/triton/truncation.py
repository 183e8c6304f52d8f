"""Top-k, top-p and min-p of one row by one program, without a sort of the row.

The tokens that a truncated row keeps are the first of its ranking (logit, then lowest id), as long
as the weight before each stays below a target: with weight 1 a token that is top-k, with its
probability top-p. So both end at a place in the ranking, the *cut*.

- Where the set is small, it lies in a few segments of the row (``draw_from_few``).
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
    LOWEST,
    before_each,
    best_of_list,
    best_of_segments,
    gather_segments,
    kth_largest,
    list_masses,
    write_places,
)
from mini_infer.kernels.triton.noise import divide, rank_key, row_keys, token_of
from mini_infer.kernels.triton.row_search import extent, find_cut, mass_from

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST_FINITE = tl.constexpr(-3.4028234663852886e38)
PAIRED = tl.constexpr(8)
"""Candidates that all others are compared with at a time."""
FIRST_TRY = tl.constexpr(32)
LAST_TRY = tl.constexpr(256)
"""Segments that the candidates of top-p alone are sought in; of top-k as many as it says."""


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
    few: tl.constexpr,
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
    key0, key1 = row_keys(seed, position)
    floor = divide(highest, temperature, reciprocal) + log_min_p
    best_of_few = tl.full([], LOWEST, tl.int64)
    total = 0.0
    limits_mass = top_p < float("inf")
    if (top_k > 0) | limits_mass:
        masses = tl.load(segment_mass_ptr + index, mask=exists, other=0.0)
        masses *= tl.where(highests > float("-inf"), tl.exp2((highests - highest) * scale), 0.0)
        total = tl.sum(masses, 0)
        best_of_few = draw_from_few(
            row_ptr,
            hashes_ptr,
            candidates_ptr,
            places_ptr,
            highests,
            masses,
            exists,
            num_segments,
            vocab_size,
            highest,
            scale,
            total,
            temperature,
            top_k,
            top_p,
            floor,
            key0,
            key1,
            tile,
            few,
            segment,
            padded_segments,
        )
    if best_of_few > LOWEST:
        best = best_of_few
    else:
        winner = token_of(best)
        logit = tl.load(row_ptr + winner).to(tl.float32)
        cut = tl.full([], LOWEST, tl.int64)
        if (top_k > 0) | limits_mass:
            cut = search_row(
                row_ptr,
                candidates_ptr,
                vocab_size,
                rank_key(logit, winner),
                tl.exp2((logit - highest) * scale),
                highest,
                scale,
                total,
                top_k,
                top_p,
                tile,
                listed,
            )
        likely = divide(logit, temperature, reciprocal) >= floor
        if not (likely & (rank_key(logit, winner) >= cut)):
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


@triton.jit
def draw_from_few(
    row_ptr,
    hashes_ptr,
    candidates_ptr,
    places_ptr,
    highests,
    masses,
    exists,
    num_segments,
    vocab_size,
    highest,
    scale,
    total,
    temperature,
    top_k,
    top_p,
    floor,
    key0,
    key1,
    tile: tl.constexpr,
    few: tl.constexpr,
    segment: tl.constexpr,
    padded_segments: tl.constexpr,
):
    """The best noisy token that the row keeps, if all that it keeps are ``few``; else ``LOWEST``.

    Down to the k-th largest of the segments' largest logits all tokens are candidates: at least k.
    """
    best = tl.full([], LOWEST, tl.int64)
    limits_count = top_k > 0
    most = tl.minimum(num_segments, LAST_TRY)
    wanted = tl.where(limits_count, top_k, tl.minimum(most, FIRST_TRY))
    trying = wanted <= most
    while trying:
        lowest = tl.maximum(kth_largest(highests, exists, wanted), LOWEST_FINITE)
        chosen = exists & (highests >= lowest)
        enough = limits_count | (tl.sum(tl.where(chosen, masses, 0.0), 0) >= top_p * total)
        if enough:
            num_chosen = write_places(places_ptr, chosen, padded_segments)
            count = gather_segments(
                row_ptr,
                places_ptr,
                candidates_ptr,
                num_chosen,
                vocab_size,
                lowest,
                segment,
                tile,
                few,
            )
            keys = tl.load(candidates_ptr + tl.arange(0, few))
            weights = list_masses(keys, highest, scale)
            enough = limits_count | (tl.sum(weights, 0) >= top_p * total)
            enough &= count <= few
            if enough:
                number, mass = before_each(keys, candidates_ptr, count, highest, scale, few, PAIRED)
                kept = keys > LOWEST
                if limits_count:
                    kept &= number < top_k.to(tl.float32)
                    total = tl.sum(tl.where(kept, weights, 0.0), 0)
                kept &= mass < top_p * total
                best = best_of_list(keys, kept, hashes_ptr, temperature, floor, key0, key1)
        trying = (not enough) & (not limits_count) & (wanted < most)
        wanted = tl.minimum(wanted * (LAST_TRY // FIRST_TRY), most)
    return best


@triton.jit
def search_row(
    row_ptr,
    candidates_ptr,
    vocab_size,
    winner_key,
    winner_mass,
    highest,
    scale,
    total,
    top_k,
    top_p,
    tile: tl.constexpr,
    listed: tl.constexpr,
):
    """The rank key at which the row's kept tokens end, by passes over the row.

    Where the row's best noisy token, at ``winner_key``, is kept, any key at or below that may do.
    """
    cut = tl.full([], LOWEST, tl.int64)
    least = winner_key
    # By count, then by mass: a loop, for the search is most of what there is to compile.
    for by_mass in range(2):
        weight, target, searches = 0.0, 0.0, False
        if by_mass == 0:
            if top_k > 0:
                weight, lowest = extent(row_ptr, vocab_size, tile)
                least = rank_key(lowest, vocab_size)
                cut = least
                target = top_k.to(tl.float32)
                searches = target < weight
        elif top_p < float("inf"):
            # Down to the row's best, or to the last of top-k.
            weight = mass_from(row_ptr, vocab_size, least, highest, scale, tile)
            if top_k > 0:
                total = weight
            target = top_p * total
            searches = (top_k > 0) | (weight - winner_mass >= target)
        if searches:
            cut = find_cut(
                row_ptr,
                candidates_ptr,
                vocab_size,
                least,
                weight,
                highest,
                scale,
                target,
                by_mass != 0,
                tile,
                listed,
            )
            least = cut
    return cut
