"""What both attention kernels share: one tile of keys and values, and the online softmax."""

import triton
import triton.language as tl


@triton.jit
def block_ids(table, first_key, end_key, block_size: tl.constexpr, tile_keys: tl.constexpr):
    """Block of each key of a tile ``[tile_keys]``. Past the context the table is not looked at."""
    keys = first_key + tl.arange(0, tile_keys)
    return tl.load(table + keys // block_size, mask=keys < end_key, other=0)


@triton.jit
def attend_tile(
    acc,
    row_sum,
    row_max,
    q,
    position,
    blocks,
    first_key,
    end_key,
    k_head,
    v_head,
    block_stride,
    token_stride,
    scale_log2,
    window: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
):
    """Adds the tile of keys from ``first_key``, which lie in ``blocks [tile_keys]``,
    to the running softmax of ``q [M, D]`` at ``position [M]``.

    ``acc [M, D]`` is the weighted sum of values so far, ``row_sum [M]`` of the weights, relative to
    2 ** ``row_max [M]``: exponents are base 2, which is what the hardware computes (arXiv
    2205.14135, 2307.08691). Where not ``masked``, every key of the tile is visible to every query.
    """
    keys = first_key + tl.arange(0, tile_keys)
    dims = tl.arange(0, padded_dim)
    exists = keys < end_key
    token = blocks.to(tl.int64) * block_stride + (keys % block_size) * token_stride
    offset = token[:, None] + dims[None, :]
    inside = dims[None, :] < head_dim
    if masked:
        inside &= exists[:, None]
    k = tl.load(k_head + offset, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if masked:
        visible = exists[None, :] & (keys[None, :] <= position[:, None])
        if window > 0:
            visible &= keys[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is not a number.
    base = tl.where(new_max == float("-inf"), 0.0, new_max) if masked else new_max
    weights = tl.exp2(scores * scale_log2 - base[:, None])  # one fused multiply-add
    shrink = tl.exp2(row_max - base)
    v = tl.load(v_head + offset, mask=inside, other=0.0)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, row_sum * shrink + tl.sum(weights, 1), new_max
