"""What both kinds of small-batch products share."""

import triton
import triton.language as tl


@triton.jit
def prefetch_lines(pointers, wanted):
    """Asks for the cache lines at ``pointers`` to be brought into L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_slab(slab_ptr, slab_lines, slab_total, tile: tl.constexpr):
    """This program's share, ``slab_lines`` lines of 64 values, of ``slab_total`` lines in a row."""
    first = tl.program_id(0) * slab_lines
    for start in range(0, slab_lines, tile):
        line = start + tl.arange(0, tile)
        wanted = (line < slab_lines) & (first + line < slab_total)
        prefetch_lines(slab_ptr + (first + line).to(tl.int64) * 64, wanted)


@triton.jit
def finish(
    out,
    addend,
    out_ptr,
    first,
    num_rows,
    num_outputs,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    gated: tl.constexpr,
):
    """Adds ``addend``, applies the gate, rounds once, and stores ``[tile_m, tile_n]``."""
    out += addend
    if gated:
        gate, up = tl.split(tl.reshape(out, [tile_m, tile_n, 2]))
        out = gate / (1.0 + tl.exp(-gate)) * up
    row = tl.arange(0, tile_m)[:, None]
    n = first + tl.arange(0, tile_n)[None, :]
    target = out_ptr + row.to(tl.int64) * num_outputs + n
    inside = (row < num_rows) & (n < num_outputs)
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_addend(
    bias_ptr,
    out_ptr,
    first,
    num_rows,
    num_outputs,
    tile_m: tl.constexpr,
    lines: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
):
    """What is added to the sums: the bias and, where it ``adds``, what ``out`` holds. Float32."""
    line = tl.arange(0, lines)[None, :]
    n = first + (line // 2 if gated else line)
    is_output = n < num_outputs
    result = tl.zeros([tile_m, lines], tl.float32)
    if has_bias:
        source = n + (line % 2 * num_outputs if gated else 0)
        result += tl.load(bias_ptr + source, mask=is_output, other=0.0).to(tl.float32)
    if adds:
        row = tl.arange(0, tile_m)[:, None]
        held = out_ptr + row.to(tl.int64) * num_outputs + n
        result += tl.load(held, mask=(row < num_rows) & is_output, other=0.0).to(tl.float32)
    return result
