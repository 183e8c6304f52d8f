"""The few tokens of a row that matter, found through its segments.

A segment is a run of neighbouring tokens, of which ``scan_kernel`` leaves the largest logit, the
mass and the best noisy token. The k-th largest of the segments' largest logits bounds the k-th
largest logit from below, and few tokens lie above it: so the k likeliest tokens are gathered from
about k segments, without a pass over the row.
"""

import triton
import triton.language as tl

from mini_infer.kernels.triton.noise import (
    divide,
    float_of,
    negative_gumbel,
    order_key,
    rank_key,
    token_of,
)

LOWEST = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)


@triton.jit
def add_three(a0, a1, a2, b0, b1, b2):
    """Three sums in one reduction."""
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def sums_above(keys, weight, key1, key2, key3):
    """The weight of the keys at or above each of three thresholds."""
    return tl.reduce(
        (
            tl.where(keys >= key1, weight, 0.0),
            tl.where(keys >= key2, weight, 0.0),
            tl.where(keys >= key3, weight, 0.0),
        ),
        0,
        add_three,
    )


@triton.jit
def highest_reaching(keys, weight, low, end, target, highest, scale, by_mass):
    """A key in ``[low, end)`` that parts the keys where their weight from above reaches ``target``.

    It is ``low`` where even that falls short. The keys are in registers, so a search over all bits
    takes less than a pass over the row; it mostly ends early, when one key is left in the range.
    """
    above_low, above_end = float("inf"), 0.0
    while (end - low != 1) & (
        above_low - above_end >= 1.5 * weight_at(low, highest, scale, by_mass)
    ):
        span = (end - low).to(tl.uint64, bitcast=True)  # may exceed an int64
        quarter = (span >> 2).to(tl.int64, bitcast=True)
        key2 = low + (span >> 1).to(tl.int64, bitcast=True)
        key1, key3 = tl.maximum(low + quarter, low + 1), key2 + quarter
        above1, above2, above3 = sums_above(keys, weight, key1, key2, key3)
        in1, in2, in3 = above1 >= target, above2 >= target, above3 >= target
        end = tl.where(in3, end, tl.where(in2, key3, tl.where(in1, key2, key1)))
        above_end = tl.where(in3, above_end, tl.where(in2, above3, tl.where(in1, above2, above1)))
        low = tl.where(in3, key3, tl.where(in2, key2, tl.where(in1, key1, low)))
        above_low = tl.where(in3, above3, tl.where(in2, above2, tl.where(in1, above1, above_low)))
    return low


@triton.jit
def weight_at(key, highest, scale, by_mass):
    """What a token weighs whose rank key is ``key``, or at least its order key; 1 but by mass."""
    return tl.where(by_mass, tl.exp2((float_of((key >> 32).to(tl.int32)) - highest) * scale), 1.0)


@triton.jit
def kth_largest(values, exists, k):
    """A value that k of those that exist reach, or more if they tie; k is at most their number."""
    keys = tl.where(exists, order_key(values).to(tl.int64), LOWEST)
    low = tl.min(tl.where(exists, keys, HIGHEST), 0)
    end = tl.max(keys, 0) + 1
    key = highest_reaching(keys, exists.to(tl.float32), low, end, k.to(tl.float32), 0.0, 0.0, False)
    return float_of(key.to(tl.int32))


@triton.jit
def write_places(places_ptr, chosen, size: tl.constexpr):
    """Writes the indices that are chosen of ``[size]``, in order. Returns their number."""
    tl.debug_barrier()  # an earlier list may still be being read
    index = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(places_ptr + index, tl.arange(0, size), mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def load_segments(
    row_ptr, places_ptr, first, count, vocab_size, segment: tl.constexpr, tile: tl.constexpr
):
    """Ids and logits of the tokens of some listed segments, ``tile`` tokens in all."""
    lanes = tl.arange(0, tile)
    place = first + lanes // segment
    inside = place < count
    ids = tl.load(places_ptr + place, mask=inside, other=0) * segment + lanes % segment
    inside &= ids < vocab_size
    return ids, tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def clear(candidates_ptr, listed: tl.constexpr):
    """Empties the list of candidates: ``LOWEST`` is no token's rank key."""
    tl.debug_barrier()
    tl.store(candidates_ptr + tl.arange(0, listed), tl.full([listed], LOWEST, tl.int64))
    tl.debug_barrier()


@triton.jit
def append(candidates_ptr, count, ids, x, chosen, listed: tl.constexpr):
    """Appends the chosen tokens' rank keys, as far as there is room. Returns the new count."""
    place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(candidates_ptr + place, rank_key(x, ids), mask=chosen & (place < listed))
    return count + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def gather_segments(
    row_ptr,
    places_ptr,
    candidates_ptr,
    num_segments,
    vocab_size,
    lowest,
    segment: tl.constexpr,
    tile: tl.constexpr,
    listed: tl.constexpr,
):
    """Lists the listed segments' tokens of at least the logit ``lowest``. Returns their number."""
    clear(candidates_ptr, listed)
    count = 0
    for first in range(0, num_segments, tile // segment):
        ids, x = load_segments(row_ptr, places_ptr, first, num_segments, vocab_size, segment, tile)
        count = append(candidates_ptr, count, ids, x, x >= lowest, listed)
    tl.debug_barrier()
    return count


@triton.jit
def list_masses(keys, highest, scale):
    """The mass of each candidate, in units of the likeliest token's."""
    mass = tl.exp2((float_of((keys >> 32).to(tl.int32)) - highest) * scale)
    return tl.where(keys > LOWEST, mass, 0.0)


@triton.jit
def before_each(
    keys, candidates_ptr, count, highest, scale, listed: tl.constexpr, at_once: tl.constexpr
):
    """Number and mass of the candidates that rank before each of ``keys [listed]``.

    Every pair is compared: for some hundred candidates that is less than a sort.
    """
    number = tl.zeros([listed], tl.float32)
    mass = tl.zeros([listed], tl.float32)
    for first in range(0, count, at_once):
        for place in tl.static_range(at_once):  # what is beyond the count is LOWEST
            other = tl.load(candidates_ptr + first + place)
            precedes = other > keys
            number += tl.where(precedes, 1.0, 0.0)
            mass += tl.where(precedes, list_masses(other, highest, scale), 0.0)
    return number, mass


@triton.jit
def best_of_list(keys, kept, hashes_ptr, temperature, floor, key0, key1):
    """The best noisy token of the candidates that are kept, and not below the floor."""
    ids = token_of(keys)
    hashes = tl.load(hashes_ptr + ids, mask=kept, other=0).to(tl.uint32, bitcast=True)
    reciprocal = tl.div_rn(1.0, temperature)
    scaled = divide(float_of((keys >> 32).to(tl.int32)), temperature, reciprocal)
    score = scaled - negative_gumbel(hashes, key0, key1)
    return tl.max(tl.where(kept & (scaled >= floor), rank_key(score, ids), LOWEST), 0)


@triton.jit
def best_of_segments(
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
    segment: tl.constexpr,
    tile: tl.constexpr,
    padded_segments: tl.constexpr,
):
    """The best noisy token of the row at or above cut and floor.

    A segment's best that is kept is the segment's best of those kept. Only segments whose best is
    dropped, but beats the best of all those, have to be looked at again.
    """
    reciprocal = tl.div_rn(1.0, temperature)
    exists = bests > LOWEST
    tokens = token_of(bests)
    logits = tl.load(row_ptr + tokens, mask=exists, other=float("-inf")).to(tl.float32)
    kept = exists & (rank_key(logits, tokens) >= cut)
    kept &= divide(logits, temperature, reciprocal) >= floor
    best = tl.max(tl.where(kept, bests, LOWEST), 0)
    again = exists & ~kept & (bests > best) & (order_key(highests) >= (cut >> 32))
    again &= divide(highests, temperature, reciprocal) >= floor
    count = write_places(places_ptr, again, padded_segments)
    for first in range(0, count, tile // segment):
        ids, x = load_segments(row_ptr, places_ptr, first, count, vocab_size, segment, tile)
        scaled = divide(x, temperature, reciprocal)
        stays = (scaled >= floor) & (rank_key(x, ids) >= cut) & (x > float("-inf"))
        hashes = tl.load(hashes_ptr + ids, mask=stays, other=0).to(tl.uint32, bitcast=True)
        score = scaled - negative_gumbel(hashes, key0, key1)
        best = tl.maximum(best, tl.max(tl.where(stays, rank_key(score, ids), LOWEST), 0))
    return best
