"""Products with one row of activations or a few: every weight is read once, by plain threads."""

import triton
import triton.language as tl

from mini_infer.kernels.triton.skinny_parts import finish, load_addend


@triton.jit
def fold(products, rows: tl.constexpr, lines: tl.constexpr, tile_k: tl.constexpr):
    """Sums the eight values that a thread loads at once, in that thread: ``[.., tile_k / 8]``."""
    return tl.sum(tl.reshape(products, [rows, lines, tile_k // 8, 8]), 3)


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
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    early: tl.constexpr,
):
    """The products of all rows with ``lines`` lines of weights, in float32.

    Grid: (cdiv(num_outputs, outputs),), where ``gated`` programs own a line of the gate and one of
    up per output. What does not depend on the kernel before, the first tile of weights above all,
    is loaded while that one still runs. The norm's scale is one number a row: it multiplies sums.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * (lines // 2 if gated else lines)
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
        tl.extra.cuda.gdc_wait()
    is_row = row < num_rows
    values = x_ptr + row * size + k
    x = tl.load(values, mask=is_row & inside, other=0.0).to(tl.float32)
    addend = load_addend(
        bias_ptr, out_ptr, first, num_rows, num_outputs, tile_m, lines, has_bias, adds, gated
    )
    if has_norm:
        squares = fold(x * x, tile_m, 1, tile_k)
        x *= g.to(tl.float32)
    acc = fold(x * w.to(tl.float32), tile_m, lines, tile_k)
    for start in range(tile_k, size, tile_k):
        wanted = is_output
        present = is_row
        scaled = True
        if size % tile_k != 0:  # else no mask depends on the loop, and several tiles are in flight
            scaled = k < size - start
            wanted = is_output & scaled
            present = is_row & scaled
        w = tl.load(weights + start, mask=wanted, other=0.0, eviction_policy="evict_first")
        x = tl.load(values + start, mask=present, other=0.0).to(tl.float32)
        if has_norm:
            squares += fold(x * x, tile_m, 1, tile_k)
            x *= tl.load(norm_ptr + start + k, mask=scaled, other=0.0).to(tl.float32)
        acc += fold(x * w.to(tl.float32), tile_m, lines, tile_k)
    out = tl.sum(acc, 2)
    if has_norm:
        out *= tl.rsqrt(tl.sum(squares, 2) / size + eps)
    finish(out, addend, out_ptr, first, num_rows, num_outputs, tile_m, lines, gated)
