"""Gumbel noise and ranking keys inside kernels: twins of ``mini_infer.kernels.sampling``'s."""

import math

import triton
import triton.language as tl

_GOLDEN_64 = tl.constexpr(-0x61C8_8646_80B5_83EB)  # 0x9E37_79B9_7F4A_7C15 as an int64
_LOW_32 = tl.constexpr(0xFFFF_FFFF)
_LN_2 = tl.constexpr(math.log(2.0))
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_SERIES_END = tl.constexpr(1.0 / 16.0)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def row_keys(seed, position):
    """Two uint32 keys of (mixed seed, position), both int64: see ``sampling.row_keys``."""
    key = (seed + position * _GOLDEN_64).to(tl.uint64, bitcast=True)
    key = (key ^ (key >> 30)) * 0xBF58_476D_1CE4_E5B9
    key = (key ^ (key >> 27)) * 0x94D0_49BB_1331_11EB
    key ^= key >> 31
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def fast_log2(x):
    """The hardware's logarithm: one instruction, where ``tl.log2`` takes some twenty."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def divide(x, divisor, reciprocal):
    """``x / divisor``, rounded to nearest, given the divisor's rounded reciprocal (Markstein,
    "Computation of elementary functions on the IBM RISC System/6000", 1990).

    A division proper is twice as long, and a row has one divisor.
    """
    quotient = x * reciprocal
    refined = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    return tl.where(tl.abs(quotient) < float("inf"), refined, quotient)


@triton.jit
def negative_gumbel(token_hashes, key0, key1):
    """Minus Gumbel noise of uint32 token hashes, within 2e-6 of ``sampling.negative_gumbel``.

    The hardware's logarithm has a small absolute error, which near 1 is a large relative one; there
    log(1 - u) is a series.
    """
    h = token_hashes ^ key0
    h = (h ^ (h >> 17)) * 0xED5A_D4BB + key1
    h = (h ^ (h >> 11)) * 0xAC4C_1B51
    h = (h ^ (h >> 15)) * 0x3184_8BAB
    h ^= h >> 14
    u = (h & 0x7FFF_FFFF).to(tl.float32) * 2.0**-31 + 2.0**-32
    u = tl.minimum(u, _LARGEST_BELOW_ONE)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    exponential = tl.where(u < _SERIES_END, series, -_LN_2 * fast_log2(1.0 - u))
    return _LN_2 * fast_log2(exponential)


@triton.jit
def order_key(value):
    """An int32 that sorts as the float32 ``value`` does; NaN, of either sign, is largest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0.0 into 0.0
    key = bits ^ ((bits >> 31) & 0x7FFF_FFFF)
    return tl.where(value != value, 0x7FFF_FFFF, key)


@triton.jit
def float_of(key):
    """The float32 whose ``order_key`` is the int32 ``key``."""
    return (key ^ ((key >> 31) & 0x7FFF_FFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_key(value, token_id):
    """An int64 that sorts as (value, -token id): ties rank by id, lowest first."""
    return (order_key(value).to(tl.int64) << 32) | (_LOW_32 - token_id.to(tl.int64))


@triton.jit
def token_of(key):
    """The token id of a ``rank_key``."""
    return _LOW_32 - (key & _LOW_32)
