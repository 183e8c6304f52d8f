"""What the attention kernels share: a tile of keys and values, and the online softmax."""

import triton
import triton.language as tl

MOST_LOOKUPS = tl.constexpr(8)


def key_alignment(block_size: int, tile_keys: int) -> int:
    """Where tiles must begin for ``key_blocks``, in keys: blocks, or parts of one, fill a tile."""
    unit = min(block_size, tile_keys)
    whole = (
        tile_keys % unit == 0 and block_size % unit == 0 and tile_keys // unit <= MOST_LOOKUPS.value
    )
    return unit if whole else 1


@triton.jit
def key_blocks(
    table,
    first_key,
    end_key,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    align: tl.constexpr,
):
    """Block of each key of a tile ``[tile_keys]``. Past ``end_key`` the table is not looked at.

    ``first_key`` is a multiple of ``align``, see ``key_alignment``. If that is 1, each key's block
    is looked up, else each block once.
    """
    keys = tl.arange(0, tile_keys)
    if align == 1:
        keys += first_key
        return tl.load(table + keys // block_size, mask=keys < end_key, other=0)
    blocks = keys * 0
    for part in tl.static_range(tile_keys // align):
        key = first_key + part * align
        block = tl.load(table + key // block_size, mask=key < end_key, other=0)
        blocks = tl.where(keys // align == part, block, blocks)
    return blocks


@triton.jit
def known_blocks(ids, tile_keys: tl.constexpr, align: tl.constexpr):
    """The same where the tile's blocks have been looked up already, one every ``align`` keys."""
    keys = tl.arange(0, tile_keys)
    blocks = keys * 0
    for part in tl.static_range(tile_keys // align):
        blocks = tl.where(keys // align == part, tl.load(ids + part), blocks)
    return blocks


@triton.jit
def load_tile(
    head_cache,
    blocks,
    block_stride: tl.constexpr,
    token_stride: tl.constexpr,
    first_key,
    end_key,
    block_size: tl.constexpr,
    align: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
):
    """Keys or values of one head ``[tile_keys, padded_dim]``, zeros where none are."""
    keys = tl.arange(0, tile_keys)
    token = (keys if align == block_size else first_key + keys) % block_size
    dims = tl.arange(0, padded_dim)
    offsets = blocks.to(tl.int64) * block_stride + token * token_stride
    pointers = head_cache + offsets[:, None] + dims[None, :]
    if not masked and head_dim == padded_dim:
        return tl.load(pointers)
    inside = dims[None, :] < head_dim
    if masked:
        inside &= (first_key + keys < end_key)[:, None]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_tiles(
    k_head,
    v_head,
    blocks,
    block_stride: tl.constexpr,
    token_stride: tl.constexpr,
    first_key,
    end_key,
    block_size: tl.constexpr,
    align: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
):
    """The keys and the values of a tile: the two caches are laid out alike. See ``load_tile``."""
    k = load_tile(
        k_head,
        blocks,
        block_stride,
        token_stride,
        first_key,
        end_key,
        block_size,
        align,
        head_dim,
        padded_dim,
        tile_keys,
        masked,
    )
    v = load_tile(
        v_head,
        blocks,
        block_stride,
        token_stride,
        first_key,
        end_key,
        block_size,
        align,
        head_dim,
        padded_dim,
        tile_keys,
        masked,
    )
    return k, v


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
