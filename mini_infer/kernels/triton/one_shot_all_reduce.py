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
VECTOR_BYTES = 16
FEW_ROWS = 512
"""About so many programs run at the same time."""
AHEAD = 264
"""Of many rows: what a row's way takes, in programs that start meanwhile."""
MANY_BYTES = 32
"""Of many rows: what a thread has of one."""
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


@triton.jit
def send(
    part_ptr,
    addresses,
    turns_ptr,
    row,
    rank,
    num_ranks,
    max_rows,
    peer,
    column,
    others,
    word: tl.constexpr,
    empty: tl.constexpr,
    other_nan: tl.constexpr,
    size: tl.constexpr,
):
    """Writes this rank's part of ``row`` into the mailboxes of the ``others``; returns it."""
    turn = tl.load(turns_ptr + row)
    here = row.to(tl.int64) * size + column
    part = tl.load(part_ptr + here, mask=column < size, other=0.0)
    bits = part.to(word, bitcast=True)
    sent = tl.where(bits == empty, tl.full([], other_nan, word), bits)
    box = (turn * max_rows + row).to(tl.int64) * (num_ranks - 1) + rank - (rank > peer)
    theirs = tl.multiple_of(addresses.to(tl.pointer_type(word)), 16)
    target = theirs[:, None] + (box * size)[:, None] + column[None, :]
    tl.store(target, tl.broadcast_to(sent[None, :], target.shape), mask=others)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turns_ptr + row, 1 - turn)
    return part


@triton.jit(do_not_specialize=["rank", "num_ranks", "num_rows", "max_rows", "eps", "max_polls"])
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
    num_rows,
    max_rows,
    eps,
    max_polls,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    padded_peers: tl.constexpr,
    ahead: tl.constexpr,
    adds: tl.constexpr,
    has_norm: tl.constexpr,
    early: tl.constexpr,
):
    """A row: its sum over the ranks, with the residual, and the norm of that.

    Grid: (rows + ahead,). A program sends the row of its number, then waits for what the others
    send of the row that was sent ``ahead`` programs before, and ends that.

    More programs than run at a time wait for nothing that can't come: a GPU starts them in order.
    Of all rows that a rank is not done with, take the first, and of that rank the program that has
    to end it. All programs before it have ended, so it has started, or starts next. What it waits
    for was sent by programs of no higher number, of which the same is true: they have ended, or
    this is the row that they end, too, and they send before they wait.

    ``mailboxes [num_ranks]`` holds addresses, one for each rank, of ``[2, max_rows, num_ranks - 1,
    size]``: by turn, row and sender. ``turns [2, max_rows]`` are those of rows sent and of rows
    taken: of each number, one program reads and changes it.
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

    if ahead == 0:
        part = send(
            part_ptr,
            addresses,
            turns_ptr,
            row,
            rank,
            num_ranks,
            max_rows,
            peer,
            column,
            others,
            word,
            empty,
            other_nan,
            size,
        )
        here = row.to(tl.int64) * size + column
    else:
        if row < num_rows:
            send(
                part_ptr,
                addresses,
                turns_ptr,
                row,
                rank,
                num_ranks,
                max_rows,
                peer,
                column,
                others,
                word,
                empty,
                other_nan,
                size,
            )
        row -= ahead
        if row < 0:
            return
        here = row.to(tl.int64) * size + column
        part = tl.load(part_ptr + here, mask=inside, other=0.0)
    if adds:
        residual = tl.load(residual_ptr + here, mask=inside, other=0.0)

    turn = tl.load(turns_ptr + max_rows + row)
    box = (turn * max_rows + row).to(tl.int64) * (num_ranks - 1) + peer - (peer > rank)
    ours = tl.multiple_of(own_address.to(tl.pointer_type(word)), 16)
    boxes = ours + (box * size)[:, None] + column[None, :]
    received = receive(boxes, others, empty, max_polls)
    # The sender's next turn but one begins after our next turn, hence after this kernel.
    tl.store(boxes, tl.full(boxes.shape, empty, word), mask=others)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turns_ptr + max_rows + row, 1 - turn)

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
    calls, one after the other. ``mailboxes [N]`` and ``turns [2, max_rows]`` are the ``addresses``
    and ``turns`` of ``parallel.symmetric_memory.Mailboxes``.
    """
    num_rows, size = part.shape
    num_ranks = len(mailboxes)
    out = part.new_empty(num_rows, size) if residual is None else residual
    normed = None if norm is None else part.new_empty(num_rows, size)
    weight, eps = (part, 0.0) if norm is None else norm
    padded_size = power_of_two(size)
    ahead, num_warps = launch_shape(num_rows, padded_size * part.element_size())
    early = starts_early(part.device)
    one_shot_kernel[num_rows + ahead,](
        part,
        out,
        weight,
        out,
        out if normed is None else normed,
        mailboxes,
        turns,
        rank,
        num_ranks,
        num_rows,
        turns.shape[1],
        eps,
        max_polls,
        size=size,
        padded_size=padded_size,
        padded_peers=1 if num_ranks == 2 else power_of_two(num_ranks),
        ahead=ahead,
        adds=residual is not None,
        has_norm=norm is not None,
        early=early,
        num_warps=num_warps,
        launch_pdl=early,
    )
    return out, normed


def launch_shape(num_rows: int, row_bytes: int) -> tuple[int, int]:
    """How many programs a row is sent ahead, and warps. For few rows a thread has one vector, as
    long as there are threads: nothing is quicker to begin. Many keep the link busy instead."""
    if num_rows <= FEW_ROWS:
        return 0, min(MAX_WARPS, max(1, row_bytes // (VECTOR_BYTES * 32)))
    return AHEAD, min(MAX_WARPS, max(1, row_bytes // (MANY_BYTES * 32)))
