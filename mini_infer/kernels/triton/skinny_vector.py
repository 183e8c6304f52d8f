"""Products with one row of activations or a few: every weight is read once, by plain threads."""

import triton
import triton.language as tl

from mini_infer.kernels.triton.skinny_parts import finish, load_addend


@triton.jit
def fold(products, rows: tl.constexpr, lines: tl.constexpr, tile_k: tl.constexpr):
    """Sums the eight values that a thread loads at once, in that thread: ``[.., tile_k / 8]``."""
    return tl.sum(tl.reshape(products, [rows, lines, tile_k // 8, 8]), 3)


@triton.jit
def load_tiles(
    source, mask, tile_k: tl.constexpr, count: tl.constexpr, eviction_policy: tl.constexpr
):
    """The next ``count`` tiles of ``tile_k`` values."""
    tiles: tl.tuple = ()
    for tile in tl.static_range(count):
        pointers = source + tile * tile_k
        tiles += (tl.load(pointers, mask=mask, other=0.0, eviction_policy=eviction_policy),)
    return tiles


@triton.jit
def multiply(
    xs,
    ws,
    gs,
    acc,
    squares,
    tile_m: tl.constexpr,
    lines: tl.constexpr,
    tile_k: tl.constexpr,
    count: tl.constexpr,
    has_norm: tl.constexpr,
):
    """Adds the products of ``count`` tiles to ``acc``, squares of activations to ``squares``."""
    for tile in tl.static_range(count):
        x = xs[tile].to(tl.float32)
        if has_norm:
            squares += fold(x * x, tile_m, 1, tile_k)
            x *= gs[tile].to(tl.float32)
        acc += fold(x * ws[tile].to(tl.float32), tile_m, lines, tile_k)
    return acc, squares


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "eps"])
def vector_kernel(
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
    lines: tl.constexpr,
    tile_k: tl.constexpr,
    ahead: tl.constexpr,
    depth: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    early: tl.constexpr,
):
    """The products of all rows with ``lines`` lines of weights, in float32.

    Grid: (cdiv(num_outputs, outputs),), where ``gated`` programs own a line of the gate and one of
    up per output. What does not depend on the kernel before, the first ``ahead`` tiles of weights
    above all, is loaded while that one still runs; then come ``depth`` tiles at a time. The norm's
    scale is one number a row: it multiplies sums.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    short: tl.constexpr = (size - 1) % tile_k + 1  # values of the first tile: only it has a mask
    first = tl.program_id(0) * (lines // 2 if gated else lines)
    row = tl.arange(0, tile_m)[:, None, None]
    line = tl.arange(0, lines)[None, :, None]
    k = tl.arange(0, tile_k)[None, None, :]
    n = first + (line // 2 if gated else line)
    is_output = n < num_outputs
    source = n + (line % 2 * num_outputs if gated else 0)
    is_row = row < num_rows
    weights = weight_ptr + source.to(tl.int64) * size + k
    values = x_ptr + row * size + k
    scales = norm_ptr + k
    every = k >= 0
    inside = k < short
    w = load_tiles(weights, is_output & inside, tile_k, 1, "evict_first")
    g = load_tiles(scales, inside, tile_k, 1, "") if has_norm else w
    ws = load_tiles(weights + short, is_output, tile_k, ahead - 1, "evict_first")
    gs = load_tiles(scales + short, every, tile_k, ahead - 1, "") if has_norm else ws
    if early:
        tl.extra.cuda.gdc_wait()
    x = load_tiles(values, is_row & inside, tile_k, 1, "")
    xs = load_tiles(values + short, is_row, tile_k, ahead - 1, "")
    addend = load_addend(
        bias_ptr, out_ptr, first, num_rows, num_outputs, tile_m, lines, has_bias, adds, gated
    )
    acc = tl.zeros([tile_m, lines, tile_k // 8], tl.float32)
    squares = tl.zeros([tile_m, 1, tile_k // 8], tl.float32)
    acc, squares = multiply(
        x + xs, w + ws, g + gs, acc, squares, tile_m, lines, tile_k, ahead, has_norm
    )
    for start in range(short + (ahead - 1) * tile_k, size, depth * tile_k):
        next_w = load_tiles(weights + start, is_output, tile_k, depth, "evict_first")
        next_x = load_tiles(values + start, is_row, tile_k, depth, "")
        next_g = load_tiles(scales + start, every, tile_k, depth, "") if has_norm else next_w
        acc, squares = multiply(
            next_x, next_w, next_g, acc, squares, tile_m, lines, tile_k, depth, has_norm
        )
    out = tl.sum(acc, 2)
    if has_norm:
        out *= tl.rsqrt(tl.sum(squares, 2) / size + eps)
    finish(out, addend, out_ptr, first, num_rows, num_outputs, tile_m, lines, gated)
