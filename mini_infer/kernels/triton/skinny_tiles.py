"""Products with a few dozen rows of activations, on tensor cores."""

import triton
import triton.language as tl

from mini_infer.kernels.triton.skinny_parts import (
    finish,
    load_addend,
    prefetch_lines,
    prefetch_slab,
)


@triton.jit(
    do_not_specialize=["num_rows", "num_outputs", "eps", "ahead", "slab_lines", "slab_total"]
)
def tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    slab_ptr,
    num_rows,
    num_outputs,
    eps,
    ahead,
    slab_lines,
    slab_total,
    size: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    parts: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    early: tl.constexpr,
):
    """``tile_n`` outputs of all rows. Grid: (cdiv(num_outputs, tile_n), splits)."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    lines: tl.constexpr = 2 * tile_n if gated else tile_n
    step: tl.constexpr = parts * tile_k
    span: tl.constexpr = (size + step * splits - 1) // (step * splits) * step
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, size)
    first = tl.program_id(0) * tile_n
    column = tl.arange(0, lines)
    n = first + (column // 2 if gated else column)
    source = n + (column % 2 * num_outputs if gated else 0)
    row = tl.arange(0, tile_m)
    if parts > 1:
        part = tl.arange(0, parts)[:, None, None] * tile_k
        k_x = part + tl.arange(0, tile_k)[None, None, :]
        k_w = part + tl.arange(0, tile_k)[None, :, None]
        row = row[None, :, None]
        is_output = (n < num_outputs)[None, None, :]
        source = source[None, None, :]
        acc = tl.zeros([parts, tile_m, lines], tl.float32)
        squares = tl.zeros([parts, tile_m], tl.float32)
    else:
        k_x = tl.arange(0, tile_k)[None, :]
        k_w = tl.arange(0, tile_k)[:, None]
        row = row[:, None]
        is_output = (n < num_outputs)[None, :]
        source = source[None, :]
        acc = tl.zeros([tile_m, lines], tl.float32)
        squares = tl.zeros([tile_m], tl.float32)
    is_row = row < num_rows
    weights = weight_ptr + source.to(tl.int64) * size
    if early:
        for offset in range(0, ahead, 8):  # lines of 64 values of each output
            line_k = begin + (offset + tl.arange(0, 8)[None, :]) * 64
            prefetch_lines(
                tl.reshape(weights, [lines, 1]) + line_k,
                tl.reshape(is_output, [lines, 1]) & (line_k < end),
            )
        prefetch_slab(slab_ptr, slab_lines, slab_total, 256)
        tl.extra.cuda.gdc_wait()
    if splits == 1:  # early: its latency is another's bandwidth
        addend = load_addend(
            bias_ptr, out_ptr, first, num_rows, num_outputs, tile_m, lines, has_bias, adds, gated
        )
    for start in tl.range(begin, end, step, num_stages=stages):
        w_inside = is_output
        x_inside = is_row
        if size % step != 0:
            w_inside = is_output & (k_w < size - start)
            x_inside = is_row & (k_x < size - start)
        w = tl.load(weights + start + k_w, mask=w_inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + row * size + start + k_x, mask=x_inside, other=0.0)
        if has_norm:
            g = tl.load(norm_ptr + start + k_x, mask=k_x < size - start, other=0.0)
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 2 if parts > 1 else 1)
            x = (wide * g.to(tl.float32)).to(x.dtype)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if parts > 1:
        acc = tl.sum(acc, 0)
        squares = tl.sum(squares, 0)
    if has_norm:
        acc *= tl.rsqrt(squares / size + eps)[:, None]
    if splits > 1:
        place = tl.arange(0, tile_m)[:, None] * lines + tl.arange(0, lines)[None, :]
        tile = partial_ptr + tl.program_id(0) * (splits * tile_m * lines) + place
        tl.store(tile + tl.program_id(1) * (tile_m * lines), acc)
        tl.debug_barrier()
        count = count_ptr + tl.program_id(0)
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(count, 0)
            total = tl.zeros([tile_m, lines], tl.float32)
            for split in tl.static_range(splits):
                total += tl.load(tile + split * (tile_m * lines), cache_modifier=".cg")
            addend = load_addend(
                bias_ptr,
                out_ptr,
                first,
                num_rows,
                num_outputs,
                tile_m,
                lines,
                has_bias,
                adds,
                gated,
            )
            finish(total, addend, out_ptr, first, num_rows, num_outputs, tile_m, tile_n, gated)
    else:
        finish(acc, addend, out_ptr, first, num_rows, num_outputs, tile_m, tile_n, gated)
