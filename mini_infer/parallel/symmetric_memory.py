"""Memory of a GPU that the other GPUs of a host write into: mailboxes for sums over ranks."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

MAX_RANKS = 8
"""A part is sent as often as there are others: with more of them, rings send less."""
MAX_SENT_BYTES = 4 * 2**20
"""What one of several ranks sends at most. Of two H200s it is faster than NCCL's sum up to there at
least."""
MAX_SENT_BYTES_OF_TWO = 128 * 2**20
"""What one of two ranks sends at most: no ring sends less, so it is memory that ends it."""
VECTOR_BYTES = 16
"""Rows are whole numbers of what a thread sends at once."""
NUM_TURNS = 2


@dataclass(frozen=True, eq=False)
class Mailboxes:
    """Of each of N ranks the memory that the others leave their parts of a sum in.

    A rank's own is ``[2, max_rows, N - 1, size]``, by turn, row and sender, and full of ``0xFF``
    bytes, but for what is on its way. Two turns are enough: who writes the third part has read the
    second of everybody, and that was sent after the first was taken out.
    """

    rank: int
    addresses: Tensor
    """``[N]`` int64: where each rank's are, as seen from this rank's GPU."""
    turns: Tensor
    """``[max_rows]`` int32, of this rank: which turn each row's program has next."""
    size: int
    dtype: torch.dtype
    memory: Any
    """What keeps it mapped."""

    def fit(self, part: Tensor) -> bool:
        """Is ``part [T, size]`` small enough to be sent to everybody at once?"""
        num_rows, size = part.shape
        return (
            0 < num_rows <= len(self.turns)
            and size == self.size
            and part.dtype == self.dtype
            and part.is_contiguous()
        )


def most_rows(num_ranks: int, row_bytes: int, step_rows: int) -> int:
    """Rows that a sum over ``num_ranks`` may have to be worth mailboxes, of steps of up to
    ``step_rows``; 0 for none.

    A part is sent to ``num_ranks - 1`` others, where a ring sends ``2 - 2 / num_ranks`` times a
    part: as much for two ranks, and less for more of them.
    """
    if not 1 < num_ranks <= MAX_RANKS or row_bytes % VECTOR_BYTES:
        return 0
    limit = MAX_SENT_BYTES_OF_TWO if num_ranks == 2 else MAX_SENT_BYTES
    return min(step_rows, limit // ((num_ranks - 1) * row_bytes))


def mailbox_bytes(num_ranks: int, row_bytes: int, step_rows: int) -> int:
    """What ``open_mailboxes`` takes of each rank's GPU."""
    max_rows = most_rows(num_ranks, row_bytes, step_rows)
    return NUM_TURNS * max_rows * (num_ranks - 1) * row_bytes


def open_mailboxes(
    size: int,
    dtype: torch.dtype,
    step_rows: int,
    device: torch.device,
    group: ProcessGroup | None = None,
) -> Mailboxes | None:
    """Mailboxes for rows of ``size`` values, of steps of up to ``step_rows`` of them; None where
    GPUs don't reach each other's memory.

    A collective of ``group``, by default of all processes, which have a GPU each: all of them get
    some, or none.
    """
    group = group or dist.group.WORLD
    assert group is not None
    max_rows = most_rows(group.size(), size * dtype.itemsize, step_rows)
    if max_rows == 0:
        return None
    mailboxes, reason = None, "another rank could not map it"
    try:
        mailboxes = _mapped(group, max_rows, size, dtype, device)
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
    open_everywhere = torch.tensor(int(mailboxes is not None), device=device)
    dist.all_reduce(open_everywhere, op=dist.ReduceOp.MIN, group=group)
    if open_everywhere:
        return mailboxes
    logger.warning("GPUs share no memory, so that NCCL adds up what ranks have: %s", reason)
    return None


def _mapped(
    group: ProcessGroup, max_rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> Mailboxes:
    # Multicast is a resource of the host's switches, and nothing here needs it.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    if symmetric.get_backend(device) != "CUDA":
        symmetric.set_backend("CUDA")
    own = symmetric.empty(NUM_TURNS, max_rows, group.size() - 1, size, dtype=dtype, device=device)
    own.view(torch.uint8).fill_(0xFF)
    torch.cuda.synchronize(device)  # before anybody can write there
    handle = symmetric.rendezvous(own, group)
    offset = own.data_ptr() - handle.buffer_ptrs[group.rank()]  # of memory from a pool
    addresses = [base + offset for base in handle.buffer_ptrs]
    return Mailboxes(
        group.rank(),
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(max_rows, dtype=torch.int32, device=device),
        size,
        dtype,
        (own, handle),
    )
