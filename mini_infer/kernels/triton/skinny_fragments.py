"""Products with a few rows of activations and short lines of weights: a chain of latencies.

A small model's layer is over before its weights could have been read twice. What counts is what a
kernel does between the end of the kernel before and its own: here it loads the activations, and
multiplies. All its weights have been loaded by then, norm and sum are taken along, and no result
passes through memory, unless it is the last.
"""

import triton
import triton.language as tl

from mini_infer.kernels.triton.skinny_parts import finish, load_addend


@triton.jit
def left_operand(low, high, parts: tl.constexpr):
    """Two tiles ``[parts * 8, 32]`` as one ``[parts, 16, 32]``, k permuted.

    The 16 bytes that each thread has loaded are what a tensor core wants from it, in another order
    of k: so nothing moves between threads, as long as both operands have that order (Marlin, arXiv
    2408.11743, stores weights so). The join makes Triton choose the layout of four values a thread.
    """
    both = tl.reshape(tl.join(low, high), [parts, 8, 4, 2, 4, 2])
    return tl.reshape(tl.permute(both, (0, 5, 1, 3, 2, 4)), [parts, 16, 32])


@triton.jit
def right_operand(tile, parts: tl.constexpr):
    """A tile ``[parts * 8, 32]`` as ``[parts, 32, 8]``, k permuted as in ``left_operand``."""
    split = tl.reshape(tile, [parts, 8, 4, 2, 4])
    return tl.reshape(tl.permute(split, (0, 3, 2, 4, 1)), [parts, 32, 8])


@triton.jit
def load_chunks(
    source,
    k,
    size: tl.constexpr,
    parts: tl.constexpr,
    chunks: tl.constexpr,
    eviction_policy: tl.constexpr,
):
    """The chunks of each part, ``[parts * 8, 32]`` each; zeros beyond ``size``."""
    tiles: tl.tuple = ()
    for chunk in tl.static_range(chunks):
        pointers = source + chunk * 32
        if (parts - 1) * chunks * 32 + (chunk + 1) * 32 > size:
            inside = k < size - chunk * 32
            tile = tl.load(pointers, mask=inside, other=0.0, eviction_policy=eviction_policy)
        else:
            tile = tl.load(pointers, eviction_policy=eviction_policy)
        tiles += (tile,)
    return tiles


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "eps"])
def fragment_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    eps,
    size: tl.constexpr,
    tile_m: tl.constexpr,
    parts: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    early: tl.constexpr,
):
    """The products of all rows with eight lines of weights. Grid: (tiles of outputs).

    A warp each takes one of ``parts`` of k, all of which it holds in registers. The norm's scale is
    one number a row: it multiplies sums. Its weight multiplies activations, which are rounded then.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    chunks: tl.constexpr = (size + 32 * parts - 1) // (32 * parts)
    groups: tl.constexpr = tile_m // 8
    pairs: tl.constexpr = (groups + 1) // 2
    first = tl.program_id(0) * (4 if gated else 8)
    # In two dimensions, as that leaves no choice of layouts: eight rows of a part to a warp.
    index = tl.arange(0, parts * 8)[:, None]
    eight = index % 8
    k = index // 8 * (chunks * 32) + tl.arange(0, 32)[None, :]
    # Beyond the last line, or row, that one once more: what comes of it is not stored.
    n = tl.minimum(first + (eight // 2 if gated else eight), num_outputs - 1)
    n = n.to(tl.int64) + (eight % 2 * num_outputs if gated else 0)
    ws = load_chunks(weight_ptr + n * size + k, k, size, parts, chunks, "evict_first")
    gs = load_chunks(norm_ptr + eight * 0 + k, k, size, parts, chunks, "") if has_norm else ws
    if early:
        tl.extra.cuda.gdc_wait()
    xs: tl.tuple = ()
    for group in tl.static_range(groups):
        values = x_ptr + tl.minimum(group * 8 + eight, num_rows - 1) * size + k
        xs += (load_chunks(values, k, size, parts, chunks, ""),)
    addends: tl.tuple = ()
    for pair in tl.static_range(pairs):
        target = out_ptr + pair * 16 * num_outputs
        rows_left = num_rows - pair * 16
        addends += (
            load_addend(
                bias_ptr, target, first, rows_left, num_outputs, 16, 8, has_bias, adds, gated
            ),
        )
    # Or else ptxas lets loads wait until what is loaded before them is used: it moves neither loads
    # down across a barrier, nor products up across a branch.
    tl.debug_barrier()
    if num_rows > 0:
        for pair in tl.static_range(pairs):
            even = tl.zeros([parts, 16, 8], tl.float32)  # two sums: a product waits for its own
            odd = tl.zeros([parts, 16, 8], tl.float32)
            squares = tl.zeros([parts, 8, 4, 2], tl.float32)
            for chunk in tl.static_range(chunks):
                low = xs[2 * pair][chunk]
                high = xs[2 * pair + 1][chunk] if groups > 1 else tl.zeros_like(low)
                if has_norm:
                    wide = tl.join(low, high).to(tl.float32)
                    squares += tl.sum(tl.reshape(wide * wide, [parts, 8, 4, 8, 2]), 3)
                    low *= gs[chunk]
                    high *= gs[chunk]
                left = left_operand(low, high, parts)
                right = right_operand(ws[chunk], parts)
                if chunk % 2 == 0:
                    even = tl.dot(left, right, even, input_precision="ieee")
                else:
                    odd = tl.dot(left, right, odd, input_precision="ieee")
            out = tl.sum(even + odd, 0)
            if has_norm:
                total = tl.sum(tl.sum(squares, 2), 0)  # [8, 2]
                scale = tl.reshape(tl.permute(tl.rsqrt(total / size + eps), (1, 0)), [16])
                out *= scale[:, None]
            target = out_ptr + pair * 16 * num_outputs
            rows_left = num_rows - pair * 16
            finish(out, addends[pair], target, first, rows_left, num_outputs, 16, 8, gated)
