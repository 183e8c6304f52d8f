"""Sums over the ranks of a tensor-parallel model, with what follows them: the residual stream and
its norm.

One kernel, one crossing of the link. A rank writes its part straight into every other rank's
memory, and whoever waits for it watches the values themselves: a mailbox is full of a pattern that
no sender ever writes, so a value is there as soon as it is another one. No flag is raised behind
the data, no fence waits for their arrival, nobody asks back. The idea is Lamport's queue of one
producer (1977), as in the LL protocol of NCCL and the one-shot all-reduce of TensorRT-LLM.
"""

import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.reference import Norm
from mini_infer.kernels.triton.launch import power_of_two, starts_early

MAX_WARPS = 16
THREAD_BYTES = 32
"""Of a row, from all others, what a thread takes: two vectors."""
MAX_POLLS = 2**26
"""A minute or so. Whoever watches the ranks has ended them long before."""


@triton.jit
def give_up(polls):
    """Ends the kernel with an error, and so the process: nothing sensible can come any more."""
    tl.inline_asm_elementwise(
        "trap; mov.b32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def receive(boxes, awaited, empty, max_polls):
    """Loads ``boxes`` until no ``awaited`` value is ``empty``; 0 where none is awaited."""
    bits = tl.load(boxes, mask=awaited, other=0, volatile=True)
    polls = 0
    while (tl.max(tl.max((bits == empty).to(tl.int32), 1), 0) != 0) & (polls < max_polls):
        bits = tl.load(boxes, mask=awaited, other=0, volatile=True)
        polls += 1
    if polls == max_polls:
        give_up(polls)
    return bits


@triton.jit(do_not_specialize=["rank", "num_ranks", "max_rows", "eps", "max_polls"])
def one_shot_kernel(
    part_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    normed_ptr,
    mailboxes_ptr,
    turns_ptr,
    rank,
    num_ranks,
    max_rows,
    eps,
    max_polls,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    padded_peers: tl.constexpr,
    adds: tl.constexpr,
    has_norm: tl.constexpr,
    early: tl.constexpr,
):
    """A row: its sum over the ranks, with the residual, and the norm of that.

    Grid: (rows,). ``mailboxes [num_ranks]`` holds addresses, one for each rank, of ``[2, max_rows,
    num_ranks - 1, size]``: by turn, row and sender. A program owns the mailboxes of its row, and
    counts its turns.

    There may be more programs than run at a time, as GPUs start them in order (which all do, though
    no manual says so). Take the first row that not all ranks are done with. Its program has started
    on each, or is next: those before it have ended. It sends before it waits, so all that it waits
    for comes.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    word: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    empty: tl.constexpr = -1  # a NaN that no arithmetic makes
    other_nan: tl.constexpr = 0x7FFFFFFF if dtype.primitive_bitwidth == 32 else 0x7FFF
    column = tl.arange(0, padded_size)
    inside = column < size
    peer = 1 - rank + tl.arange(0, 1) if padded_peers == 1 else tl.arange(0, padded_peers)
    is_other = (peer < num_ranks) & (peer != rank)
    others = is_other[:, None] & inside[None, :]
    addresses = tl.load(mailboxes_ptr + peer, mask=is_other, other=0)
    own_address = tl.load(mailboxes_ptr + rank)
    if has_norm:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if early:
        tl.extra.cuda.gdc_wait()

    turn = tl.load(turns_ptr + row)
    here = row.to(tl.int64) * size + column
    part = tl.load(part_ptr + here, mask=inside, other=0.0)
    if adds:
        residual = tl.load(residual_ptr + here, mask=inside, other=0.0)
    row_boxes = (turn * max_rows + row).to(tl.int64) * (num_ranks - 1)

    bits = part.to(word, bitcast=True)
    sent = tl.where(bits == empty, tl.full([], other_nan, word), bits)
    theirs = tl.multiple_of(addresses.to(tl.pointer_type(word)), 16)
    box = row_boxes + rank - (rank > peer)  # a rank sends itself nothing, and has no box for that
    target = theirs[:, None] + (box * size)[:, None] + column[None, :]
    tl.store(target, tl.broadcast_to(sent[None, :], target.shape), mask=others)

    ours = tl.multiple_of(own_address.to(tl.pointer_type(word)), 16)
    box = row_boxes + peer - (peer > rank)
    boxes = ours + (box * size)[:, None] + column[None, :]
    received = receive(boxes, others, empty, max_polls)
    # The sender's next turn but one begins after our next turn, hence after this kernel.
    tl.store(boxes, tl.full(boxes.shape, empty, word), mask=others)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turns_ptr + row, 1 - turn)

    parts = received.to(dtype, bitcast=True).to(tl.float32)
    if padded_peers == 1:
        total = part.to(tl.float32) + tl.sum(parts, 0)
    else:  # in the same order on every rank
        parts = tl.where((peer == rank)[:, None], part.to(tl.float32)[None, :], parts)
        total = tl.sum(parts, 0)
    if adds:
        total += residual.to(tl.float32)
    out = total.to(dtype)
    tl.store(out_ptr + here, out, mask=inside)
    if has_norm:
        wide = out.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        normed = (wide * scale).to(dtype).to(tl.float32)  # rounded as the reference does
        tl.store(normed_ptr + here, (normed * weight.to(tl.float32)).to(dtype), mask=inside)


def sum_over_ranks(
    part: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    mailboxes: Tensor,
    turns: Tensor,
    rank: int,
    max_polls: int = MAX_POLLS,
) -> tuple[Tensor, Tensor | None]:
    """See ``reference.sum_of_parts``, whose parts are every rank's ``part [T, size]``.

    The sum is ``residual`` itself where that is given, else a new tensor. All ranks make the same
    calls, one after the other. ``mailboxes [N]`` and ``turns [max_rows]`` are the ``addresses`` and
    ``turns`` of ``parallel.symmetric_memory.Mailboxes``.
    """
    num_rows, size = part.shape
    num_ranks = len(mailboxes)
    out = part.new_empty(num_rows, size) if residual is None else residual
    normed = None if norm is None else part.new_empty(num_rows, size)
    weight, eps = (part, 0.0) if norm is None else norm
    padded_size = power_of_two(size)
    padded_peers = 1 if num_ranks == 2 else power_of_two(num_ranks)
    early = starts_early(part.device)
    one_shot_kernel[num_rows,](
        part,
        out,
        weight,
        out,
        out if normed is None else normed,
        mailboxes,
        turns,
        rank,
        num_ranks,
        len(turns),
        eps,
        max_polls,
        size=size,
        padded_size=padded_size,
        padded_peers=padded_peers,
        adds=residual is not None,
        has_norm=norm is not None,
        early=early,
        num_warps=num_warps(padded_peers * padded_size * part.element_size()),
        launch_pdl=early,
    )
    return out, normed


def num_warps(tile_bytes: int) -> int:
    """Two vectors for each thread, as long as there are threads."""
    return min(MAX_WARPS, max(1, tile_bytes // (THREAD_BYTES * 32)))
