"""Products with one row of activations or a few: every weight is read once, by plain threads."""

import triton
import triton.language as tl

from mini_infer.kernels.triton.skinny_parts import finish, load_addend, prefetch_slab


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "eps", "slab_lines", "slab_total"])
def vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    slab_ptr,
    num_rows,
    num_outputs,
    eps,
    slab_lines,
    slab_total,
    size: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    unrolled: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    early: tl.constexpr,
):
    """``tile_n`` outputs of all rows, in float32. Grid: (cdiv(num_outputs, tile_n),).

    What does not depend on the kernel before, the first tile of weights above all, is loaded
    while that one still runs. ``gated`` programs own the same rows of the gate and of up.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    lines: tl.constexpr = 2 * tile_n if gated else tile_n
    first = tl.program_id(0) * tile_n
    row = tl.arange(0, tile_m)[:, None, None]
    line = tl.arange(0, lines)[None, :, None]
    k = tl.arange(0, tile_k)[None, None, :]
    n = first + (line // 2 if gated else line)
    is_output = n < num_outputs
    source = n + (line % 2 * num_outputs if gated else 0)
    weights = weight_ptr + source.to(tl.int64) * size + k
    inside = k < size
    w = tl.load(weights, mask=is_output & inside, other=0.0, eviction_policy="evict_first")
    g = tl.load(norm_ptr + k, mask=inside, other=0.0) if has_norm else w
    if early:
        prefetch_slab(slab_ptr, slab_lines, slab_total, 256)
        tl.extra.cuda.gdc_wait()
    is_row = row < num_rows
    values = x_ptr + row * size + k
    x = tl.load(values, mask=is_row & inside, other=0.0)
    addend = load_addend(
        bias_ptr, out_ptr, first, num_rows, num_outputs, tile_m, lines, has_bias, adds, gated
    )
    acc = tl.zeros([tile_m, lines, tile_k], tl.float32)
    squares = tl.zeros([tile_m, 1, tile_k], tl.float32)
    if unrolled:
        for start in tl.static_range(tile_k, size, tile_k):
            wide = x.to(tl.float32)
            if has_norm:
                squares += wide * wide
                wide *= g.to(tl.float32)
            acc += wide * w.to(tl.float32)
            inside = k < size - start
            w = tl.load(
                weights + start,
                mask=is_output & inside,
                other=0.0,
                eviction_policy="evict_first",
            )
            g = tl.load(norm_ptr + start + k, mask=inside, other=0.0) if has_norm else w
            x = tl.load(values + start, mask=is_row & inside, other=0.0)
    else:
        for start in range(tile_k, size, tile_k):
            inside = k < size - start
            next_w = tl.load(
                weights + start,
                mask=is_output & inside,
                other=0.0,
                eviction_policy="evict_first",
            )
            next_x = tl.load(values + start, mask=is_row & inside, other=0.0)
            wide = x.to(tl.float32)
            if has_norm:
                squares += wide * wide
                wide *= g.to(tl.float32)
                g = tl.load(norm_ptr + start + k, mask=inside, other=0.0)
            acc += wide * w.to(tl.float32)
            w = next_w
            x = next_x
    wide = x.to(tl.float32)
    if has_norm:
        squares += wide * wide
        wide *= g.to(tl.float32)
    acc += wide * w.to(tl.float32)
    out = tl.sum(acc, 2)
    if has_norm:
        out *= tl.rsqrt(tl.sum(squares, 2) / size + eps)
    finish(out, addend, out_ptr, first, num_rows, num_outputs, tile_m, tile_n, gated)
