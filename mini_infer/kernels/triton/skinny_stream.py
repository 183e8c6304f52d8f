"""Products of a few dozen rows whose weights stream through shared memory (Hopper, Gluon).

Triton's own loop (``skinny_tiles``) begins after the wait for the predecessor, and each thread
copies 16 bytes at a time. Here one thread asks the card's copy engine (TMA) for whole tiles, those
of weights before that wait, and a warp group's products (wgmma) read them where they arrive.

Gluon is the language below Triton: the same compiler, but the kernel says which thread holds which
element (layouts), what lies in shared memory, and when to wait. To read it:

- **The ring** has ``stages`` slots of shared memory, each with a tile of weights and one of rows.
  Once all warps have read a slot, the tiles ``stages`` steps of k later are asked for.
- **Barriers and phases**: a slot has a barrier (mbarrier). ``expect`` says how many bytes are to
  come, the copy engine counts them down, and at zero the barrier's phase ends: 0, 1, 0, 1 ..., one
  each time the ring comes round. No second barrier says that a slot is free: those who read it
  also ask for the next copies, so a barrier of the program's threads says it.
- **One warp group** (four warps, the unit of wgmma). Kernels for many rows give copying a warp of
  its own; with few, a step's product takes less time than its copies, and its warps wait anyway.
  Two programs share a processor, so that one still reads while the other sums up and stores.
- **Weights before ``gdc_wait``, rows after**: no kernel of a step writes weights, so the first
  tiles come while the predecessor ends. Rows are what it writes. One ``expect`` announces both.
- **Splits of k**: where tiles of outputs are fewer than processors, programs share a tile, each
  with a range of steps. The last to arrive adds up all sums, in the order of the splits, so that
  results do not depend on who that is.

wgmma takes 64 lines of its left operand, the weights, and any multiple of 8 of the right one, the
rows. What lies outside a matrix the copy engine fills with zeros.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mini_infer.kernels.triton.launch import COPY_ALIGNMENT, power_of_two

NUM_WARPS = 4
RING_BYTES = 112 * 1024
"""Two programs' rings fit a processor's shared memory (227 KiB), barriers and stores included."""


@gluon.jit(do_not_specialize=["num_rows"])
def stream_kernel(
    w_desc,
    x_desc,
    bias_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    num_rows,
    num_outputs,
    size: gl.constexpr,
    tile_m: gl.constexpr,
    tile_n: gl.constexpr,
    tile_k: gl.constexpr,
    splits: gl.constexpr,
    stages: gl.constexpr,
    has_bias: gl.constexpr,
    adds: gl.constexpr,
    gated: gl.constexpr,
    at_once: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The products of all rows with the lines of ``tile_n`` outputs. Grid: (tiles, splits).

    ``w_desc`` describes ``weight [N, size]`` in boxes of ``[tile_n, tile_k]``, ``x_desc`` the rows
    ``[num_rows, size]`` in boxes of ``[tile_m, tile_k]``. ``gated`` products have a box, a ring and
    an accumulator for the gate's lines and one for those of the up projection. The dependents are
    launched ``at_once``, or when the last tile is asked for: see ``StreamPlan``.
    """
    if at_once:
        tl.extra.cuda.gdc_launch_dependents()
    mma: gl.constexpr = gl.NVMMADistributedLayout(  # a warp has 16 of each 64 lines, and all rows
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, tile_m, 16]
    )
    dtype: gl.constexpr = w_desc.dtype
    w_ring = gl.allocate_shared_memory(dtype, [stages, tile_n, tile_k], w_desc.layout)
    up_ring = w_ring
    if gated:
        up_ring = gl.allocate_shared_memory(dtype, [stages, tile_n, tile_k], w_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [stages, tile_m, tile_k], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for slot_id in gl.static_range(stages):
        mbarrier.init(ready.index(slot_id), count=1)
    lines: gl.constexpr = 2 * tile_n if gated else tile_n
    step_bytes: gl.constexpr = (lines + tile_m) * tile_k * (dtype.primitive_bitwidth // 8)
    steps: gl.constexpr = (size + tile_k - 1) // tile_k
    begin = gl.program_id(1) * steps // splits
    count = (gl.program_id(1) + 1) * steps // splits - begin
    line = gl.program_id(0) * tile_n
    up_line = num_outputs + line
    for slot_id in gl.static_range(stages):
        bar = ready.index(slot_id)
        k = (begin + slot_id) * tile_k
        wanted = slot_id < count
        mbarrier.expect(bar, step_bytes, pred=wanted)
        tma.async_copy_global_to_shared(w_desc, [line, k], bar, w_ring.index(slot_id), pred=wanted)
        if gated:
            up_slot = up_ring.index(slot_id)
            tma.async_copy_global_to_shared(w_desc, [up_line, k], bar, up_slot, pred=wanted)
    if not at_once and count <= stages:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    for slot_id in gl.static_range(stages):
        k = (begin + slot_id) * tile_k
        tma.async_copy_global_to_shared(
            x_desc, [0, k], ready.index(slot_id), x_ring.index(slot_id), pred=slot_id < count
        )
    acc = gl.zeros([tile_n, tile_m], gl.float32, mma)
    up = gl.zeros([tile_n, tile_m], gl.float32, mma)
    slot = 0
    phase = 0
    for step in range(count):
        bar = ready.index(slot)
        mbarrier.wait(bar, phase)
        rows = x_ring.index(slot).permute((1, 0))
        acc = warpgroup_mma(w_ring.index(slot), rows, acc, is_async=True)
        if gated:
            up = warpgroup_mma(up_ring.index(slot), rows, up, is_async=True)
            acc, up = warpgroup_mma_wait(0, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        tl.debug_barrier()  # every warp has read the slot
        wanted = step + stages < count
        k = (begin + step + stages) * tile_k
        mbarrier.expect(bar, step_bytes, pred=wanted)
        tma.async_copy_global_to_shared(w_desc, [line, k], bar, w_ring.index(slot), pred=wanted)
        if gated:
            up_slot = up_ring.index(slot)
            tma.async_copy_global_to_shared(w_desc, [up_line, k], bar, up_slot, pred=wanted)
        tma.async_copy_global_to_shared(x_desc, [0, k], bar, x_ring.index(slot), pred=wanted)
        if not at_once and step + stages == count - 1:
            tl.extra.cuda.gdc_launch_dependents()
        wraps = slot == stages - 1
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
    for slot_id in gl.static_range(stages):
        mbarrier.invalidate(ready.index(slot_id))
    is_last = True
    if splits > 1:
        n = gl.arange(0, tile_n, layout=gl.SliceLayout(1, mma))[:, None]
        place = n * tile_m + gl.arange(0, tile_m, layout=gl.SliceLayout(0, mma))[None, :]
        tile = partial_ptr + gl.program_id(0) * (splits * lines * tile_m) + place
        mine = tile + gl.program_id(1) * (lines * tile_m)
        gl.store(mine, acc)
        if gated:
            gl.store(mine + tile_n * tile_m, up)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = count_ptr + gl.program_id(0)
        is_last = gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            gl.store(arrived, 0)
            acc = gl.zeros([tile_n, tile_m], gl.float32, mma)
            up = gl.zeros([tile_n, tile_m], gl.float32, mma)
            for split in gl.static_range(splits):
                part = tile + split * (lines * tile_m)
                acc += gl.load(part, cache_modifier=".cg")
                if gated:
                    up += gl.load(part + tile_n * tile_m, cache_modifier=".cg")
    if is_last:
        sizes = num_rows, num_outputs
        finish(acc, up, bias_ptr, out_ptr, line, *sizes, has_bias, adds, gated, num_warps)


@gluon.jit
def finish(
    acc,
    up,
    bias_ptr,
    out_ptr,
    first,
    num_rows,
    num_outputs,
    has_bias: gl.constexpr,
    adds: gl.constexpr,
    gated: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Adds bias and residual to the sums ``[tile_n, tile_m]``, gates, rounds once and stores."""
    mma: gl.constexpr = acc.type.layout
    tile_n: gl.constexpr = acc.shape[0]
    tile_m: gl.constexpr = acc.shape[1]
    if has_bias:
        n = first + gl.arange(0, tile_n, layout=gl.SliceLayout(1, mma))
        acc += gl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(gl.float32)[:, None]
        if gated:
            source = bias_ptr + num_outputs + n
            up += gl.load(source, mask=n < num_outputs, other=0.0).to(gl.float32)[:, None]
    if gated:
        acc = acc / (1.0 + gl.exp(-acc)) * up
    by_line: gl.constexpr = gl.BlockedLayout(  # a thread has 8 outputs of a row: 16 bytes
        [8, 1], [tile_n // 8, 256 // tile_n], [1, num_warps], [0, 1]
    )
    n = first + gl.arange(0, tile_n, layout=gl.SliceLayout(1, by_line))[:, None]
    row = gl.arange(0, tile_m, layout=gl.SliceLayout(0, by_line))[None, :]
    target = out_ptr + row * num_outputs + n
    inside = (row < num_rows) & (n < num_outputs)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if adds:
        held = gl.load(target, mask=inside, other=0.0).to(gl.float32)
        gl.store(target, (gl.convert_layout(acc, by_line) + held).to(dtype), mask=inside)
    else:
        gl.store(target, gl.convert_layout(acc.to(dtype), by_line), mask=inside)


def stream_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: Tensor,
    *,
    tile_n: int,
    tile_k: int,
    splits: int,
    stages: int | None,
    at_once: bool,
    adds: bool,
    gated: bool,
) -> Tensor:
    """Writes ``x [T, K]`` times ``weight [N, K]`` to ``out``, or adds it, as a ``StreamPlan`` says.

    All are contiguous, and ``weight`` begins where the copy engine can take it. ``count``, one for
    each tile of outputs, is zero before and after.
    """
    num_rows, size = x.shape
    if x.data_ptr() % COPY_ALIGNMENT != 0:  # part of a tensor, from the middle of 16 bytes on
        x = x.clone()
    tile_m = max(8, power_of_two(num_rows))
    lines = 2 * tile_n if gated else tile_n
    step_bytes = (lines + tile_m) * tile_k * x.element_size()
    steps = triton.cdiv(triton.cdiv(size, tile_k), splits)
    tiles = triton.cdiv(out.shape[1], tile_n)
    partial = x  # not used
    if splits > 1:
        shape = (tiles, splits, lines, tile_m)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    stream_kernel[tiles, splits](
        _described(weight, tile_n, tile_k),
        _described(x, tile_m, tile_k),
        x if bias is None else bias,  # not read
        out,
        partial,
        count,
        num_rows,
        out.shape[1],
        size=size,
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=tile_k,
        splits=splits,
        stages=max(1, min(stages or RING_BYTES // step_bytes, steps)),
        has_bias=bias is not None,
        adds=adds,
        gated=gated,
        at_once=at_once,
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )
    return out


def _described(matrix: Tensor, *box: int) -> TensorDescriptor:
    """Where the copy engine finds boxes of ``matrix``, and how it lays them out for wgmma."""
    return TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [*box], _layout(box))


@functools.cache
def _layout(box: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for([*box], gl.bfloat16)  # any type of 16 bits
