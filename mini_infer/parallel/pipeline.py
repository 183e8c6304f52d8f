"""How hidden states get from one stage of a pipeline to the next.

A rank sends to the one of the same place in the next stage: with tensor parallelism all ranks of a
stage have the same hidden states, so nothing has to be put together.

Nothing tells a receiver what comes: both ends know it from the ``ScheduledBatch`` that they have.
"""

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mini_infer.core.engine_config import MAX_DEPTH
from mini_infer.parallel.group import (
    SINGLE,
    DistributedGroup,
    TensorParallelGroup,
    collective,
    meet,
    patience,
)
from mini_infer.parallel.rank_place import RankPlace
from mini_infer.parallel.rendezvous import Rendezvous

STAGE_SECONDS = 600.0
"""How long a stage waits for the one before it, which may have a long step: that it does not hang
is seen by who watches the ranks."""


class StageLink:
    """Of a stage without neighbours."""

    def receive_(self, x: Tensor) -> Tensor:
        """``x`` itself, now with what the stage before sent."""
        return x

    def send(self, x: Tensor) -> None:
        """Sends ``x`` to the next stage, without waiting. It must not be written to any more."""

    def receive_tokens_(self, token_ids: Tensor) -> Tensor:
        """``token_ids`` itself: in the first stage, now with what the last one fed back."""
        return token_ids

    def feed_back(self, token_ids: Tensor) -> None:
        """From the last stage to the first one; else as ``send``."""

    def slowest(self, seconds: float) -> float:
        """The largest of what the ranks of all stages measured."""
        return seconds


class DistributedLink(StageLink):
    """Point to point, between processes of ``torch.distributed``.

    A group of two for each way, and so on GPUs a communicator and a stream: what comes does not
    wait for what goes, nor either for a stage's sums.
    """

    def __init__(
        self,
        world: DistributedGroup,
        before: ProcessGroup | None,
        behind: ProcessGroup | None,
        back: ProcessGroup | None,
        num_stages: int,
    ) -> None:
        """``before`` and ``behind``: this rank and its neighbour, if it has one there; ``back``:
        its places in the last stage and in the first one, if it is in either."""
        self._world, self._before, self._behind, self._back = world, before, behind, back
        self._unsent: deque[tuple[dist.Work, Tensor]] = deque()
        self._most_unsent = num_stages + MAX_DEPTH
        """What was sent before so many others is there: the first stage takes in what is fed back
        as many steps later as there are stages, and some are in flight."""

    def open(self, device: torch.device) -> None:
        """Sends something each way. The first message on a way has both ends wait for each other,
        on GPUs even their hosts, and later steps rely on it that a sender does not."""
        x = torch.zeros(1, device=device)
        self.receive_(x)
        self.send(x)
        if self._before is None:
            self.receive_tokens_(x.clone())
        elif self._behind is None:
            self.feed_back(x)

    def receive_(self, x: Tensor) -> Tensor:
        return x if self._before is None else _receive_(x, self._before, sender=0)

    def receive_tokens_(self, token_ids: Tensor) -> Tensor:
        assert self._back is not None, "it is in the first stage"
        return _receive_(token_ids, self._back, sender=1)

    def send(self, x: Tensor) -> None:
        if self._behind is not None:
            self._send(x, self._behind, receiver=1)

    def feed_back(self, token_ids: Tensor) -> None:
        assert self._back is not None, "it is in the last stage"
        self._send(token_ids, self._back, receiver=0)

    def _send(self, x: Tensor, pair: ProcessGroup, receiver: int) -> None:
        with collective():
            work = dist.isend(x, group=pair, group_dst=receiver)
            assert work is not None
            self._unsent.append((work, x))  # which lives until it is sent
            while self._unsent and self._may_forget():
                self._unsent.popleft()[0].wait()

    def _may_forget(self) -> bool:
        """Is the oldest of what was sent there, or must it be? gloo does not say before it is asked
        to wait."""
        return len(self._unsent) > self._most_unsent or self._unsent[0][0].is_completed()

    def slowest(self, seconds: float) -> float:
        return self._world.slowest(seconds)


def join_stages(
    place: RankPlace, device: torch.device, rendezvous: Rendezvous
) -> tuple[TensorParallelGroup, StageLink]:
    """Meets the ranks of all stages: those of this rank's own, and the way to its neighbours.

    Raises:
        CollectiveError: they did not come.
    """
    meet(place.rank, place.size, device, rendezvous, STAGE_SECONDS)
    world = DistributedGroup(place.rank, place.size, device)
    size, count = place.stage_size, place.num_stages
    last = size * (count - 1)
    group: TensorParallelGroup = SINGLE
    before = behind = back = None
    with collective():  # every rank makes every group, in the same order
        for stage in range(count) if size > 1 else ():
            ranks = [stage * size + index for index in range(size)]
            processes = dist.new_group(ranks, timedelta(seconds=patience(device)))
            if stage == place.stage:
                group = DistributedGroup(place.rank_in_stage, size, device, processes)
        for first in range(last):
            pair = dist.new_group([first, first + size], timedelta(seconds=STAGE_SECONDS))
            if place.rank == first:
                behind = pair
            elif place.rank == first + size:
                before = pair
        for first in range(size):
            pair = dist.new_group([first, first + last], timedelta(seconds=STAGE_SECONDS))
            if place.rank in (first, first + last):
                back = pair
    link = DistributedLink(world, before, behind, back, count)
    link.open(device)
    return group, link


def _receive_(x: Tensor, pair: ProcessGroup, sender: int) -> Tensor:
    with collective():
        work = dist.irecv(x, group=pair, group_src=sender)
        assert work is not None
        work.wait()  # on a GPU it is the stream that waits
    return x
