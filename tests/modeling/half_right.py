"""A proposer for tests that is right as often as they need it to be."""

from torch import Tensor

from mini_infer.modeling.proposers.early_exit import EarlyExitProposer
from mini_infer.modeling.proposers.proposer import DraftRows


class HalfRight(EarlyExitProposer):
    """Drafts with all of the target's layers, as its requests sample, and then spoils the draft of
    every third position: so rows accept none, some, or all."""

    on_device = True

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        drafts = super().propose(rows, num_drafts)
        for index in range(num_drafts):
            drafts[:, index] ^= ((rows.positions + index) % 3 == 0).long()
        return drafts


class AsksTheHost(HalfRight):
    """Does what no CUDA graph can hold."""

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        return super().propose(rows, num_drafts) + int(rows.positions[0]) * 0
