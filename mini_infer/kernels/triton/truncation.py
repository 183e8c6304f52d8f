"""Top-k, top-p and min-p of one row by one program, without a sort of the row.

The tokens that a truncated row keeps are the first of its ranking (logit, then lowest id), as long
as the weight before each stays below a target: with weight 1 a token that is top-k, with its
probability top-p. So both are one search for a place in the ranking, the *cut*:

1. Three thresholds between the lowest and the highest logit cut that range into quarters; a pass
   over the row adds up the weight above each, and the target tells the quarter of the cut. Repeat
   until few enough tokens are left in it.
2. Those are gathered and sorted, and their running sum gives the cut exactly.

Most rows need none of this. The best noisy token of the *whole* row is also the best of any set
that contains it, so it only has to be shown that it is kept, which takes one pass. (Rejection from
the whole vocabulary is FlashInfer's idea; under Gumbel noise a rejected draw is not repeated with
other noise, but the set is searched.)

Thresholds and ranks are those of logits, which the temperature's division does not reorder.
"""

import math

import triton
import triton.language as tl

from mini_infer.kernels.triton.noise import (
    divide,
    float_of,
    negative_gumbel,
    order_key,
    rank_key,
    row_keys,
    token_of,
)

_LOG2_E = tl.constexpr(math.log2(math.e))
_LOWEST = tl.constexpr(-(2**63))
_HIGHEST = tl.constexpr(2**63 - 1)


@triton.jit
def draw_truncated(
    row_ptr,
    hashes_ptr,
    candidates_ptr,
    vocab_size,
    best,
    highest,
    temperature,
    top_k,
    top_p,
    log_min_p,
    seed,
    position,
    tile: tl.constexpr,
    listed: tl.constexpr,
):
    """The rank key of the best noisy token of those that the row keeps.

    ``best`` is that of all its tokens, ``highest`` its largest logit; both are finite.
    """
    scale = _LOG2_E / temperature
    winner = token_of(best)
    logit = tl.load(row_ptr + winner).to(tl.float32)
    reciprocal = tl.div_rn(1.0, temperature)
    floor = divide(highest, temperature, reciprocal) + log_min_p
    likely = divide(logit, temperature, reciprocal) >= floor
    limits_mass = top_p < float("inf")
    kept = likely
    cut = tl.full([], _LOWEST, tl.int64)
    is_listed = False
    if (top_k > 0) | limits_mass:
        before, mass_before, total, at_least, finite, lowest = survey(
            row_ptr, vocab_size, logit, winner, highest, scale, tile
        )
        limits_count = (top_k > 0) & (top_k < finite)
        mass = tl.where(limits_count, mass_before + tl.exp2((logit - highest) * scale), total)
        # With top-k the whole mass is not known yet: at least the tokens so far are in it.
        kept &= (not limits_count) | (before < top_k)
        kept &= (not limits_mass) | (mass_before < top_p * mass)
        if not kept:
            least = rank_key(lowest, vocab_size)
            num_least = finite
            if limits_count:
                if before >= top_k:
                    least = rank_key(logit, vocab_size)
                    num_least = at_least
                cut, total, is_listed = find_cut(
                    row_ptr,
                    candidates_ptr,
                    vocab_size,
                    least,
                    num_least,
                    highest,
                    scale,
                    top_k.to(tl.float32),
                    tile,
                    listed,
                    False,
                )
                least, num_least = cut, top_k.to(tl.float32)
            elif mass_before >= top_p * total:
                least = rank_key(logit, vocab_size)
                num_least = at_least
            if limits_mass:
                cut, total, is_listed = find_cut(
                    row_ptr,
                    candidates_ptr,
                    vocab_size,
                    least,
                    num_least,
                    highest,
                    scale,
                    top_p * total,
                    tile,
                    listed,
                    True,
                )
            kept = likely & (rank_key(logit, winner) >= cut)
    if not kept:
        key0, key1 = row_keys(seed, position)
        if is_listed:
            best = best_of_list(
                candidates_ptr, hashes_ptr, cut, floor, temperature, key0, key1, listed
            )
        else:
            best = best_of_row(
                row_ptr, hashes_ptr, vocab_size, cut, floor, temperature, key0, key1, tile
            )
    return best


@triton.jit
def add_all(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    """Six sums in one reduction."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def add_three(a0, a1, a2, b0, b1, b2):
    """Three sums in one reduction."""
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def survey(row_ptr, vocab_size, logit, token, highest, scale, tile: tl.constexpr):
    """What stands before ``token`` in the ranking, and what there is in all.

    Returns the number and the mass of tokens before it, the whole mass, the number of tokens with
    at least its ``logit``, the number of finite logits, and the lowest of these. Masses are in
    units of the likeliest token's.
    """
    lanes = tl.arange(0, tile)
    before = tl.zeros([tile], tl.float32)
    mass_before, total, at_least, finite = before, before, before, before
    lowest = tl.full([tile], float("inf"), tl.float32)
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        weight = tl.exp2((x - highest) * scale)
        precedes = (x > logit) | ((x == logit) & (ids < token))
        before += tl.where(precedes, 1.0, 0.0)
        mass_before += tl.where(precedes, weight, 0.0)
        total += weight
        at_least += tl.where(x >= logit, 1.0, 0.0)
        is_finite = x > float("-inf")
        finite += tl.where(is_finite, 1.0, 0.0)
        lowest = tl.minimum(lowest, tl.where(is_finite, x, float("inf")))
    before, mass_before, total, at_least, finite, _ = tl.reduce(
        (before, mass_before, total, at_least, finite, finite), 0, add_all
    )
    return before, mass_before, total, at_least, finite, tl.min(lowest, 0)


@triton.jit
def find_cut(
    row_ptr,
    candidates_ptr,
    vocab_size,
    least,
    num_least,
    highest,
    scale,
    target,
    tile: tl.constexpr,
    listed: tl.constexpr,
    by_mass: tl.constexpr,
):
    """Where the ranking ends: tokens are kept while the weight before them is below ``target``.

    The cut is known to be at or above the rank key ``least``, at which ``num_least`` tokens stand.

    Returns the rank key of the last token kept, the mass kept, and whether ``candidates`` holds
    all of those, not in order, and rank keys below the cut otherwise.
    """
    low = (least >> 32).to(tl.int64)  # order keys; the weight down to low reaches the target
    high = order_key(highest).to(tl.int64) + 1  # and down to high does not
    num_low, num_high, mass_high = num_least, 0.0, 0.0
    linear = True
    while (high - low > 1) & (num_low - num_high > listed):
        low_value, high_value = float_of(low.to(tl.int32)), float_of((high - 1).to(tl.int32))
        key1 = threshold(low, high, low_value, high_value, 0.25, linear)
        key2 = threshold(low, high, low_value, high_value, 0.5, linear)
        key3 = threshold(low, high, low_value, high_value, 0.75, linear)
        num1, num2, num3, mass1, mass2, mass3 = weigh(
            row_ptr,
            vocab_size,
            float_of(key1.to(tl.int32)),
            float_of(key2.to(tl.int32)),
            float_of(key3.to(tl.int32)),
            highest,
            scale,
            tile,
        )
        reaches1 = (mass1 if by_mass else num1) >= target
        reaches2 = (mass2 if by_mass else num2) >= target
        reaches3 = (mass3 if by_mass else num3) >= target
        high = tl.where(reaches3, high, tl.where(reaches2, key3, tl.where(reaches1, key2, key1)))
        num_high = tl.where(
            reaches3, num_high, tl.where(reaches2, num3, tl.where(reaches1, num2, num1))
        )
        mass_high = tl.where(
            reaches3, mass_high, tl.where(reaches2, mass3, tl.where(reaches1, mass2, mass1))
        )
        low = tl.where(reaches3, key3, tl.where(reaches2, key2, tl.where(reaches1, key1, low)))
        num_low = tl.where(
            reaches3, num3, tl.where(reaches2, num2, tl.where(reaches1, num1, num_low))
        )
        linear = not linear  # halves of the range find it in general, halves of its bits always
    before = mass_high if by_mass else num_high
    cut, mass = least, mass_high
    if num_low - num_high > listed:
        # All of one value: as many of the lowest ids as are missing.
        weight = tl.exp2((float_of(low.to(tl.int32)) - highest) * scale)
        missing = tl.ceil((target - before) / weight) if by_mass else target - before
        cut, found = find_tie(
            row_ptr, vocab_size, float_of(low.to(tl.int32)), tl.maximum(missing, 1.0), tile
        )
        mass += found * weight
    else:
        first = tl.maximum(least, low << 32)
        gather(row_ptr, candidates_ptr, vocab_size, first, high, tile, listed)
        cut, mass_listed = cut_of_list(
            candidates_ptr, first, high, target - before, highest, scale, listed, by_mass
        )
        mass += mass_listed
    return cut, mass, (num_high == 0.0) & (num_low - num_high <= listed)


@triton.jit
def threshold(low, high, low_value, high_value, share, linear):
    """An order key strictly between two, where there is one."""
    if linear:
        key = order_key(low_value * (1.0 - share) + high_value * share).to(tl.int64)
    else:
        key = low + ((high - low).to(tl.float64) * share).to(tl.int64)
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def weigh(row_ptr, vocab_size, value1, value2, value3, highest, scale, tile: tl.constexpr):
    """Number and mass of the tokens at or above each of three logits."""
    lanes = tl.arange(0, tile)
    num1 = tl.zeros([tile], tl.float32)
    num2, num3, mass1, mass2, mass3 = num1, num1, num1, num1, num1
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        weight = tl.exp2((x - highest) * scale)
        num1 += tl.where(x >= value1, 1.0, 0.0)
        num2 += tl.where(x >= value2, 1.0, 0.0)
        num3 += tl.where(x >= value3, 1.0, 0.0)
        mass1 += tl.where(x >= value1, weight, 0.0)
        mass2 += tl.where(x >= value2, weight, 0.0)
        mass3 += tl.where(x >= value3, weight, 0.0)
    return tl.reduce((num1, num2, num3, mass1, mass2, mass3), 0, add_all)


@triton.jit
def gather(
    row_ptr, candidates_ptr, vocab_size, least, high, tile: tl.constexpr, listed: tl.constexpr
):
    """Fills ``candidates`` with the rank keys from ``least`` up to the order key ``high``."""
    lanes = tl.arange(0, tile)
    tl.debug_barrier()  # an earlier list may still be being read
    tl.store(candidates_ptr + tl.arange(0, listed), tl.full([listed], _LOWEST, tl.int64))
    tl.debug_barrier()
    count = 0
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        keys = rank_key(x, ids)
        chosen = (keys >= least) & ((keys >> 32) < high) & (ids < vocab_size)
        place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + place, keys, mask=chosen & (place < listed))
        count += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def cut_of_list(
    candidates_ptr,
    least,
    high,
    target,
    highest,
    scale,
    listed: tl.constexpr,
    by_mass: tl.constexpr,
):
    """The highest rank key down to which the list's weight reaches ``target``, and the mass there.

    It is ``least`` where rounding lets the whole list fall short. The list is in registers, so a
    search over all bits of its keys takes less than a pass over the row.
    """
    keys = tl.load(candidates_ptr + tl.arange(0, listed))
    mass = tl.exp2((float_of((keys >> 32).to(tl.int32)) - highest) * scale)
    mass = tl.where(keys > _LOWEST, mass, 0.0)
    weight = mass if by_mass else tl.where(keys > _LOWEST, 1.0, 0.0)
    low, end = least, high << 32
    while end - low != 1:
        span = (end - low).to(tl.uint64, bitcast=True)  # may exceed an int64
        key2 = low + (span >> 1).to(tl.int64, bitcast=True)
        quarter = (span >> 2).to(tl.int64, bitcast=True)
        key1, key3 = tl.maximum(low + quarter, low + 1), key2 + quarter
        above1, above2, above3 = tl.reduce(
            (
                tl.where(keys >= key1, weight, 0.0),
                tl.where(keys >= key2, weight, 0.0),
                tl.where(keys >= key3, weight, 0.0),
            ),
            0,
            add_three,
        )
        reaches1, reaches2, reaches3 = above1 >= target, above2 >= target, above3 >= target
        end = tl.where(reaches3, end, tl.where(reaches2, key3, tl.where(reaches1, key2, key1)))
        low = tl.where(reaches3, key3, tl.where(reaches2, key2, tl.where(reaches1, key1, low)))
    return low, tl.sum(tl.where(keys >= low, mass, 0.0), 0)


@triton.jit
def find_tie(row_ptr, vocab_size, value, wanted, tile: tl.constexpr):
    """The rank key of the ``wanted``-th token with this logit, or of the last, and its number."""
    lanes = tl.arange(0, tile)
    count, start, last = 0.0, 0, 0
    while (count < wanted) & (start < vocab_size):
        ids = start + lanes
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        ties = tl.where((x == value) & (ids < vocab_size), 1.0, 0.0)
        in_tile = tl.sum(ties, 0)
        rank = count + tl.cumsum(ties, 0)
        last = tl.maximum(last, tl.max(tl.where((ties > 0.0) & (rank <= wanted), ids, 0), 0))
        count = tl.minimum(count + in_tile, wanted)
        start += tile
    return rank_key(value, last), count


@triton.jit
def best_of_list(
    candidates_ptr, hashes_ptr, cut, floor, temperature, key0, key1, listed: tl.constexpr
):
    """The best noisy token of the candidates at or above cut and floor."""
    keys = tl.load(candidates_ptr + tl.arange(0, listed))
    kept = keys >= cut
    ids = token_of(keys)
    hashes = tl.load(hashes_ptr + ids, mask=kept, other=0).to(tl.uint32, bitcast=True)
    scaled = divide(float_of((keys >> 32).to(tl.int32)), temperature, tl.div_rn(1.0, temperature))
    score = scaled - negative_gumbel(hashes, key0, key1)
    return tl.max(tl.where(kept & (scaled >= floor), rank_key(score, ids), _LOWEST), 0)


@triton.jit
def best_of_row(
    row_ptr, hashes_ptr, vocab_size, cut, floor, temperature, key0, key1, tile: tl.constexpr
):
    """The best noisy token of the row at or above cut and floor."""
    lanes = tl.arange(0, tile)
    reciprocal = tl.div_rn(1.0, temperature)
    best = tl.full([], _LOWEST, tl.int64)
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        scaled = divide(x, temperature, reciprocal)
        kept = (scaled >= floor) & (rank_key(x, ids) >= cut) & (ids < vocab_size)
        if tl.max(kept.to(tl.int32), 0) > 0:
            hashes = tl.load(hashes_ptr + ids, mask=kept, other=0).to(tl.uint32, bitcast=True)
            score = scaled - negative_gumbel(hashes, key0, key1)
            keys = tl.where(kept, rank_key(score, ids), _LOWEST)
            best = tl.maximum(best, tl.max(keys, 0))
    return best
