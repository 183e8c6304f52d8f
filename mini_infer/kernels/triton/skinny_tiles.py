"""Products with up to a few dozen rows of activations, on tensor cores."""

import triton
import triton.language as tl

from mini_infer.kernels.triton.skinny_parts import finish, load_addend


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    num_rows,
    num_outputs,
    size: tl.constexpr,
    tile_m: tl.constexpr,
    lines: tl.constexpr,
    tile_k: tl.constexpr,
    parts: tl.constexpr,
    held: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    early: tl.constexpr,
):
    """The products of all rows with ``lines`` lines of weights. Grid: (tiles of outputs, splits).

    The weights are the left operand: tensor cores take 16 rows or more of that one, and 8 of the
    other. With ``parts`` the product is a batch of products over parts of k, one to a warp: so few
    lines are enough for a program that no warp repeats what another does.

    The last ``held`` values of each line are asked for before the wait, and multiplied last. The
    asynchronous copies of the loop cannot begin before the wait: Triton begins those of weights and
    of activations together.

    ``splits`` cut k over programs where outputs are few: the last to arrive sums ``partial [tiles,
    splits, tile_m, lines]`` in order, so that results do not depend on who that is.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    step: tl.constexpr = parts * tile_k
    span: tl.constexpr = (size + 16 * splits - 1) // (16 * splits) * 16
    tile_h: tl.constexpr = held // parts if held else 16
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, size) - held
    first = tl.program_id(0) * (lines // 2 if gated else lines)
    line = tl.arange(0, lines)
    n = first + (line // 2 if gated else line)
    is_output = n < num_outputs
    source = (n + (line % 2 * num_outputs if gated else 0)).to(tl.int64) * size
    row = tl.arange(0, tile_m)
    if parts > 1:
        part = tl.arange(0, parts)[:, None, None]
        k_w = part * tile_k + tl.arange(0, tile_k)[None, None, :]
        k_x = part * tile_k + tl.arange(0, tile_k)[None, :, None]
        held_w = part * tile_h + tl.arange(0, tile_h)[None, None, :]
        held_x = part * tile_h + tl.arange(0, tile_h)[None, :, None]
        weights = weight_ptr + source[None, :, None]
        is_output = is_output[None, :, None]
        row = row[None, None, :]
        acc = tl.zeros([parts, lines, tile_m], tl.float32)
    else:
        k_w = tl.arange(0, tile_k)[None, :]
        k_x = tl.arange(0, tile_k)[:, None]
        held_w = tl.arange(0, tile_h)[None, :]
        held_x = tl.arange(0, tile_h)[:, None]
        weights = weight_ptr + source[:, None]
        is_output = is_output[:, None]
        row = row[None, :]
        acc = tl.zeros([lines, tile_m], tl.float32)
    is_row = row < num_rows
    values = x_ptr + row * size
    if held > 0:
        last_w = tl.load(
            weights + end + held_w, mask=is_output, other=0.0, eviction_policy="evict_first"
        )
    if early:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(begin, end, step, num_stages=stages):
        wanted = is_output
        present = is_row
        if (span - held) % step != 0 or size % span != 0:
            wanted = is_output & (k_w < end - start)
            present = is_row & (k_x < end - start)
        w = tl.load(weights + start + k_w, mask=wanted, other=0.0, eviction_policy="evict_first")
        x = tl.load(values + start + k_x, mask=present, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if held > 0:
        last_x = tl.load(values + end + held_x, mask=is_row, other=0.0)
        acc = tl.dot(last_w, last_x, acc, input_precision="ieee")
    if parts > 1:
        acc = tl.sum(acc, 0)
    acc = tl.trans(acc)
    is_last = True
    if splits > 1:
        place = tl.arange(0, tile_m)[:, None] * lines + tl.arange(0, lines)[None, :]
        tile = partial_ptr + tl.program_id(0) * (splits * tile_m * lines) + place
        tl.store(tile + tl.program_id(1) * (tile_m * lines), acc)
        tl.debug_barrier()  # all threads have stored before one of them says so
        count = count_ptr + tl.program_id(0)
        is_last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            tl.store(count, 0)
            acc = tl.zeros([tile_m, lines], tl.float32)
            for split in tl.static_range(splits):
                acc += tl.load(tile + split * (tile_m * lines), cache_modifier=".cg")
    if is_last:
        addend = load_addend(
            bias_ptr, out_ptr, first, num_rows, num_outputs, tile_m, lines, has_bias, adds, gated
        )
        finish(acc, addend, out_ptr, first, num_rows, num_outputs, tile_m, lines, gated)
