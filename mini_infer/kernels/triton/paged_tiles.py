"""What the attention kernels share: a tile of keys and values, and the online softmax."""

import triton
import triton.language as tl

MOST_LOOKUPS = tl.constexpr(8)


def key_alignment(block_size: int, tile_keys: int) -> int:
    """Where tiles must begin for ``key_slots``, in keys: blocks, or parts of one, fill a tile."""
    unit = min(block_size, tile_keys)
    whole = (
        tile_keys % unit == 0 and block_size % unit == 0 and tile_keys // unit <= MOST_LOOKUPS.value
    )
    return unit if whole else 1


@triton.jit
def key_slots(
    table,
    first_key,
    end_key,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    align: tl.constexpr,
):
    """Where the keys of a tile lie ``[tile_keys]``, in tokens from the start of the cache.

    ``first_key`` is a multiple of ``align``, see ``key_alignment``. If that is 1, each key's block
    is looked up, else each block once. Past ``end_key`` the table is not looked at.
    """
    keys = tl.arange(0, tile_keys)
    if align == 1:
        keys += first_key
        blocks = tl.load(table + keys // block_size, mask=keys < end_key, other=0)
        return blocks * block_size + keys % block_size
    slots = keys % align
    if align < block_size:
        slots += first_key % block_size
    for part in tl.static_range(tile_keys // align):
        key = first_key + part * align
        block = tl.load(table + key // block_size, mask=key < end_key, other=0)
        slots = tl.where(keys // align == part, slots + block * block_size, slots)
    return slots


@triton.jit
def slots_in_blocks(
    blocks, first_key, block_size: tl.constexpr, tile_keys: tl.constexpr, align: tl.constexpr
):
    """The same where the tile's blocks have been looked up already, one every ``align`` keys."""
    keys = tl.arange(0, tile_keys)
    slots = keys % align
    if align < block_size:
        slots += first_key % block_size
    for part in tl.static_range(tile_keys // align):
        block = tl.load(blocks + part)
        slots = tl.where(keys // align == part, slots + block * block_size, slots)
    return slots


@triton.jit
def load_tile(
    head_cache,
    slots,
    token_stride,
    first_key,
    end_key,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
):
    """Keys or values of one head ``[tile_keys, padded_dim]``, zeros where none are."""
    dims = tl.arange(0, padded_dim)
    pointers = head_cache + slots.to(tl.int64)[:, None] * token_stride + dims[None, :]
    if not masked and head_dim == padded_dim:
        return tl.load(pointers)
    inside = dims[None, :] < head_dim
    if masked:
        keys = first_key + tl.arange(0, tile_keys)
        inside &= (keys < end_key)[:, None]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def attend_tile(acc, row_sum, row_max, q, k, v, visible, scale_log2, masked: tl.constexpr):
    """Adds a tile of keys and values ``k, v [N, D]`` to the running softmax of ``q [M, D]``.

    ``acc [M, D]`` is the weighted sum of values so far, ``row_sum [M]`` of the weights, relative to
    2 ** ``row_max [M]``: exponents are base 2, which is what the hardware computes (arXiv
    2205.14135, 2307.08691). ``visible [M or 1, N]`` says which keys a query sees; where not
    ``masked``, all queries see all keys and it is not looked at.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if masked:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is not a number.
    base = tl.where(new_max == float("-inf"), 0.0, new_max) if masked else new_max
    weights = tl.exp2(scores * scale_log2 - base[:, None])  # one fused multiply-add
    shrink = tl.exp2(row_max - base)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, row_sum * shrink + tl.sum(weights, 1), new_max
