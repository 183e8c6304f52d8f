"""The cut of one row's ranking, by passes over the row: where the kept tokens are many.

Three thresholds cut the range of logits that holds the cut into quarters. A pass adds up the weight
above each, and the target tells the quarter. Once few tokens are left in it they are gathered, and
the rest of the search is over them.
"""

import triton
import triton.language as tl

from mini_infer.kernels.triton.candidates import (
    LOWEST,
    add_three,
    append,
    clear,
    highest_reaching,
    list_masses,
    weight_at,
)
from mini_infer.kernels.triton.noise import float_of, order_key, rank_key


@triton.jit
def load_tile(row_ptr, start, vocab_size, tile: tl.constexpr):
    """Ids and logits of a tile; -inf beyond the row's end."""
    ids = start + tl.arange(0, tile)
    return ids, tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def extent(row_ptr, vocab_size, tile: tl.constexpr):
    """The number of finite logits, and the lowest of them."""
    finite = tl.zeros([tile], tl.float32)
    lowest = tl.full([tile], float("inf"), tl.float32)
    for start in range(0, vocab_size, tile):
        _, x = load_tile(row_ptr, start, vocab_size, tile)
        is_finite = x > float("-inf")
        finite += tl.where(is_finite, 1.0, 0.0)
        lowest = tl.minimum(lowest, tl.where(is_finite, x, float("inf")))
    return tl.sum(finite, 0), tl.min(lowest, 0)


@triton.jit
def mass_from(row_ptr, vocab_size, cut, highest, scale, tile: tl.constexpr):
    """The mass of the tokens down to the rank key ``cut``."""
    value = float_of((cut >> 32).to(tl.int32))
    last = 0xFFFF_FFFF - (cut & 0xFFFF_FFFF)
    mass = tl.zeros([tile], tl.float32)
    for start in range(0, vocab_size, tile):
        ids, x = load_tile(row_ptr, start, vocab_size, tile)
        kept = (x > value) | ((x == value) & (ids <= last))
        mass += tl.where(kept, tl.exp2((x - highest) * scale), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def weigh(
    row_ptr,
    vocab_size,
    value1,
    value2,
    value3,
    highest,
    scale,
    by_mass,
    tile: tl.constexpr,
):
    """The weight of the tokens at or above each of three logits."""
    above1 = tl.zeros([tile], tl.float32)
    above2, above3 = above1, above1
    for start in range(0, vocab_size, tile):
        _, x = load_tile(row_ptr, start, vocab_size, tile)
        weight = tl.where(by_mass, tl.exp2((x - highest) * scale), 1.0)
        above1 += tl.where(x >= value1, weight, 0.0)
        above2 += tl.where(x >= value2, weight, 0.0)
        above3 += tl.where(x >= value3, weight, 0.0)
    return tl.reduce((above1, above2, above3), 0, add_three)


@triton.jit
def threshold(low, high, share, linear):
    """An order key strictly between two, where there is one."""
    if linear:
        low_value, high_value = float_of(low.to(tl.int32)), float_of((high - 1).to(tl.int32))
        key = order_key(low_value * (1.0 - share) + high_value * share).to(tl.int64)
    else:
        key = low + ((high - low).to(tl.float64) * share).to(tl.int64)
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def find_cut(
    row_ptr,
    candidates_ptr,
    vocab_size,
    least,
    weight_least,
    highest,
    scale,
    target,
    by_mass,
    tile: tl.constexpr,
    listed: tl.constexpr,
):
    """The rank key of the last token kept: the weight before each of those is below ``target``.

    Args:
        least: a rank key at or below the cut.
        weight_least: the weight of the tokens down to it.
        by_mass: a token weighs its probability, in units of the likeliest's; otherwise 1.
    """
    low = (least >> 32).to(tl.int64)  # order keys; the weight down to low reaches the target
    high = order_key(highest).to(tl.int64) + 1  # and down to high does not
    above_low, above_high = weight_least, 0.0
    room = tl.where(by_mass, 0.97 * listed, 1.0 * listed)
    few = above_low <= room * weight_at(low << 32, highest, scale, by_mass)
    linear = True
    while (high - low > 1) & (not few):
        key1 = threshold(low, high, 0.25, linear)
        key2 = threshold(low, high, 0.5, linear)
        key3 = threshold(low, high, 0.75, linear)
        above1, above2, above3 = weigh(
            row_ptr,
            vocab_size,
            float_of(key1.to(tl.int32)),
            float_of(key2.to(tl.int32)),
            float_of(key3.to(tl.int32)),
            highest,
            scale,
            by_mass,
            tile,
        )
        in1, in2, in3 = above1 >= target, above2 >= target, above3 >= target
        high = tl.where(in3, high, tl.where(in2, key3, tl.where(in1, key2, key1)))
        above_high = tl.where(in3, above_high, tl.where(in2, above3, tl.where(in1, above2, above1)))
        low = tl.where(in3, key3, tl.where(in2, key2, tl.where(in1, key1, low)))
        above_low = tl.where(in3, above3, tl.where(in2, above2, tl.where(in1, above1, above_low)))
        few = above_low - above_high <= room * weight_at(low << 32, highest, scale, by_mass)
        linear = not linear  # halves of the range are best in general, halves of its bits at worst
    if few:
        first = tl.maximum(least, low << 32)
        gather(row_ptr, candidates_ptr, vocab_size, first, high, tile, listed)
        keys = tl.load(candidates_ptr + tl.arange(0, listed))
        masses = list_masses(keys, highest, scale)
        weight = tl.where(by_mass, masses, tl.where(keys > LOWEST, 1.0, 0.0))
        cut = highest_reaching(
            keys, weight, first, high << 32, target - above_high, highest, scale, by_mass
        )
    else:
        # All of one value: as many of the lowest ids as are missing.
        value = float_of(low.to(tl.int32))
        missing = (target - above_high) / weight_at(low << 32, highest, scale, by_mass)
        cut = find_tie(row_ptr, vocab_size, value, tl.maximum(tl.ceil(missing), 1.0), tile)
    return cut


@triton.jit
def gather(
    row_ptr, candidates_ptr, vocab_size, first, high, tile: tl.constexpr, listed: tl.constexpr
):
    """Lists the row's rank keys from ``first`` up to the order key ``high``."""
    clear(candidates_ptr, listed)
    value = float_of((first >> 32).to(tl.int32))
    last = 0xFFFF_FFFF - (first & 0xFFFF_FFFF)
    end = float_of((high - 1).to(tl.int32))
    count = 0
    for start in range(0, vocab_size, tile):
        ids, x = load_tile(row_ptr, start, vocab_size, tile)
        chosen = ((x > value) & (x <= end)) | ((x == value) & (ids <= last))
        count = append(candidates_ptr, count, ids, x, chosen & (ids < vocab_size), listed)
    tl.debug_barrier()


@triton.jit
def find_tie(row_ptr, vocab_size, value, wanted, tile: tl.constexpr):
    """The rank key of the ``wanted``-th token with this logit, or of the last one."""
    count, start, last = 0.0, 0, 0
    while (count < wanted) & (start < vocab_size):
        ids, x = load_tile(row_ptr, start, vocab_size, tile)
        ties = tl.where((x == value) & (ids < vocab_size), 1.0, 0.0)
        rank = count + tl.cumsum(ties, 0)
        last = tl.maximum(last, tl.max(tl.where((ties > 0.0) & (rank <= wanted), ids, 0), 0))
        count += tl.sum(ties, 0)
        start += tile
    return rank_key(value, last)
