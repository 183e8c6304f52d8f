"""What the attention kernels share: a tile of keys and values, and the online softmax."""

import triton
import triton.language as tl


@triton.jit
def block_ids(table, first_key, end_key, block_size: tl.constexpr, tile_keys: tl.constexpr):
    """Block of each key of a tile ``[tile_keys]``. Past the context the table is not looked at."""
    keys = first_key + tl.arange(0, tile_keys)
    return tl.load(table + keys // block_size, mask=keys < end_key, other=0)


@triton.jit
def key_offsets(
    blocks,
    first_key,
    block_stride,
    token_stride,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """Where each key of a tile, and its value, begins ``[tile_keys]``, in elements."""
    keys = first_key + tl.arange(0, tile_keys)
    return blocks.to(tl.int64) * block_stride + (keys % block_size) * token_stride


@triton.jit
def load_tile(
    head_cache,
    offsets,
    first_key,
    end_key,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
):
    """Keys or values of one head ``[tile_keys, padded_dim]``, zeros where none are."""
    dims = tl.arange(0, padded_dim)
    pointers = head_cache + offsets[:, None] + dims[None, :]
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
