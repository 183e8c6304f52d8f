"""Drafts that several ranks verify are one rank's: all of them look at the same tokens.

Each rank runs the proposer, as it takes part in what the target's layers add up. But what a rank
computes by itself need not be bitwise what another one does.
"""

from torch import Tensor

from mini_infer.core.batch import ScheduledBatch
from mini_infer.modeling.proposers.proposer import DeviceProposer, DraftRows, FollowingProposer
from mini_infer.parallel.group import TensorParallelGroup


def agreed(proposer: DeviceProposer, group: TensorParallelGroup) -> DeviceProposer:
    """``proposer``, or one that proposes what rank 0's does."""
    if group.size == 1:
        return proposer
    if isinstance(proposer, FollowingProposer):
        return _AgreedFollower(proposer, group)
    return _Agreed(proposer, group)


class _Agreed:
    def __init__(self, proposer: DeviceProposer, group: TensorParallelGroup) -> None:
        self._proposer, self._group = proposer, group
        self.drafts_at_once = getattr(proposer, "drafts_at_once", False)

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        return self._group.broadcast_(self._proposer.propose(rows, num_drafts).contiguous())


class _AgreedFollower(_Agreed):
    def __init__(self, proposer: FollowingProposer, group: TensorParallelGroup) -> None:
        super().__init__(proposer, group)
        self._follower = proposer

    def follow(self, batch: ScheduledBatch) -> None:
        self._follower.follow(batch)
