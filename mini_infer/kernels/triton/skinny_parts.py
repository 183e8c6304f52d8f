"""What all kinds of small-batch products share: what is added to the sums, the gate, the store."""

import triton
import triton.language as tl


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


@triton.jit
def finish(
    out,
    addend,
    out_ptr,
    first,
    num_rows,
    num_outputs,
    tile_m: tl.constexpr,
    lines: tl.constexpr,
    gated: tl.constexpr,
):
    """Adds ``addend`` to the sums ``[tile_m, lines]``, applies the gate, rounds once and stores."""
    tile_n: tl.constexpr = lines // 2 if gated else lines
    out += addend
    if gated:
        gate, up = tl.split(tl.reshape(out, [tile_m, tile_n, 2]))
        out = gate / (1.0 + tl.exp(-gate)) * up
    row = tl.arange(0, tile_m)[:, None]
    n = first + tl.arange(0, tile_n)[None, :]
    target = out_ptr + row.to(tl.int64) * num_outputs + n
    inside = (row < num_rows) & (n < num_outputs)
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside)
