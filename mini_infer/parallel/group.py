"""The ranks that hold the parts of one model, and what they say to each other.

Every rank runs the same steps in the same order, so every rank calls the same collectives in the
same order. Their results are bitwise the same on all ranks: each sum is made in one place.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mini_infer.core.errors import EngineDeadError
from mini_infer.parallel.rendezvous import Rendezvous
from mini_infer.parallel.symmetric_memory import Mailboxes, open_mailboxes

COLLECTIVE_SECONDS = 6.0
"""How long ranks on a CPU wait for one that does not come. They do the same work at the same time,
so even a step of a minute has them apart for a moment only."""
DEVICE_COLLECTIVE_SECONDS = 60.0
"""The same on GPUs, where the first collective builds all connections. What hangs is found sooner,
by who waits for the step."""
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in 2.13


class CollectiveError(EngineDeadError):
    """Another rank is gone, or did not come: no further step can work."""


class TensorParallelGroup:
    """Of one rank: it holds the whole model, and nobody has to be told anything."""

    rank = 0
    size = 1
    mailboxes: Mailboxes | None = None
    """Through which ranks add up rows in one kernel; see ``open_mailboxes``."""

    def open_mailboxes(self, size: int, dtype: torch.dtype, step_rows: int) -> None:
        """Makes ``mailboxes`` for rows of ``size``, of steps of up to ``step_rows`` of them, where
        GPUs reach each other's memory.

        All ranks call it alike.
        """

    def all_reduce_(self, x: Tensor) -> Tensor:
        """``x`` itself, now the sum of all ranks' ``x``."""
        return x

    def all_gather_columns(self, x: Tensor, num_columns: int, out: Tensor | None = None) -> Tensor:
        """``x [R, C]`` of all ranks side by side, in their order: the first ``num_columns``.

        ``out [R, num_columns]`` is where to put them, for a CUDA graph.
        """
        return x if out is None else out.copy_(x)

    def broadcast_(self, x: Tensor) -> Tensor:
        """``x`` itself, now with what rank 0 has in it."""
        return x

    def slowest(self, seconds: float) -> float:
        """The largest of what the ranks measured: who decides by the clock must decide alike."""
        return seconds

    def close(self) -> None:
        """Leaves the group; harmless when called twice."""


SINGLE = TensorParallelGroup()


class DistributedGroup(TensorParallelGroup):
    """Processes of ``torch.distributed``: gloo on a CPU, NCCL on GPUs."""

    def __init__(
        self, rank: int, size: int, device: torch.device, processes: ProcessGroup | None = None
    ) -> None:
        """``processes`` are those of the group, in order; by default all."""
        self.rank, self.size, self._device = rank, size, device
        self._processes = processes

    def open_mailboxes(self, size: int, dtype: torch.dtype, step_rows: int) -> None:
        if self._device.type == "cuda":
            with collective():
                self.mailboxes = open_mailboxes(
                    size, dtype, step_rows, self._device, self._processes
                )

    def all_reduce_(self, x: Tensor) -> Tensor:
        with collective():
            dist.all_reduce(x, group=self._processes)
        return x

    def all_gather_columns(self, x: Tensor, num_columns: int, out: Tensor | None = None) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        with collective():
            _all_gather(parts.view(-1, x.shape[1]), x.contiguous(), group=self._processes)
        return side_by_side(parts, num_columns, out)

    def broadcast_(self, x: Tensor) -> Tensor:
        with collective():
            dist.broadcast(x, group=self._processes, group_src=0)
        return x

    def slowest(self, seconds: float) -> float:
        longest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        with collective():
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._processes)
        return float(longest)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def side_by_side(parts: Tensor, num_columns: int, out: Tensor | None = None) -> Tensor:
    """``parts [N, R, C]`` -> ``[R, num_columns]``, contiguous: part 0's columns, then part 1's."""
    size = parts.shape[2]
    columns = [
        part[:, : max(0, num_columns - size * index)] for index, part in enumerate(parts.unbind())
    ]
    return torch.cat(columns, dim=1, out=out)


def join_ranks(
    rank: int, size: int, device: torch.device, rendezvous: Rendezvous
) -> TensorParallelGroup:
    """Meets the other ranks; all of them must be on their way.

    For what they say to each other they take ports that the system chooses: no port is anybody's
    to be taken.

    Raises:
        CollectiveError: they did not come.
    """
    if size == 1:
        return SINGLE
    meet(rank, size, device, rendezvous, patience(device))
    return DistributedGroup(rank, size, device)


def patience(device: torch.device) -> float:
    """Seconds that a collective waits for ranks which do the same work."""
    return DEVICE_COLLECTIVE_SECONDS if device.type == "cuda" else COLLECTIVE_SECONDS


def meet(
    rank: int, size: int, device: torch.device, rendezvous: Rendezvous, seconds: float
) -> None:
    """Makes all processes one of ``torch.distributed``'s groups, whose collectives wait for so many
    ``seconds``.

    Raises:
        CollectiveError: they did not come.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu and rendezvous.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", rendezvous.interface)
    with collective():
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=rendezvous.store(size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
            device_id=device if on_gpu else None,
        )


@contextmanager
def collective() -> Iterator[None]:
    """Gives a failed collective its type."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise CollectiveError(f"another rank is gone or hangs ({first_line})") from error
