"""A user's proposer on the device, whose mistakes become errors that name it."""

import torch
from torch import Tensor

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.errors import MiniInferError, ProposerError
from mini_infer.modeling.proposers.proposer import DeviceProposer, DraftRows, FollowingProposer

PASSED_ON = (MiniInferError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Whoever profiles memory or records graphs has a better answer to these."""


def guarded(proposer: DeviceProposer, name: str, vocab_size: int) -> DeviceProposer:
    """``proposer``, which raises ``ProposerError`` where it raises itself or returns no drafts.

    Ids are looked at on the device, without waiting for them: one outside a vocabulary of
    ``vocab_size`` tokens becomes the nearest token, and is hardly accepted. As an input it would
    end a GPU's whole process.
    """
    if isinstance(proposer, FollowingProposer):
        return _GuardedFollower(proposer, name, vocab_size)
    return _Guarded(proposer, name, vocab_size)


class _Guarded:
    def __init__(self, proposer: DeviceProposer, name: str, vocab_size: int) -> None:
        self._proposer, self._name, self._vocab_size = proposer, name, vocab_size

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        try:
            drafts: object = self._proposer.propose(rows, num_drafts)
        except PASSED_ON:
            raise
        except Exception as error:  # it is the user's code, and may raise anything
            raise self._error("propose", f"{type(error).__name__}: {error}") from error
        shape, device = (len(rows.slots), num_drafts), rows.slots.device
        if not isinstance(drafts, Tensor):
            got = f"a {type(drafts).__name__}"
        elif (drafts.shape, drafts.dtype, drafts.device) != (shape, torch.int64, device):
            got = f"{list(drafts.shape)} {drafts.dtype} on {drafts.device}"
        else:
            return drafts.clamp(0, self._vocab_size - 1)
        raise self._error(
            "propose", f"it must return {list(shape)} torch.int64 on {device}, and returned {got}"
        )

    def _error(self, method: str, fault: str) -> ProposerError:
        return ProposerError(f"speculative proposer {self._name}, method {method}(): {fault}")


class _GuardedFollower(_Guarded):
    def __init__(self, proposer: FollowingProposer, name: str, vocab_size: int) -> None:
        super().__init__(proposer, name, vocab_size)
        self._follower = proposer

    def follow(self, batch: ScheduledBatch) -> None:
        try:
            self._follower.follow(batch)
        except PASSED_ON:
            raise
        except Exception as error:
            raise self._error("follow", f"{type(error).__name__}: {error}") from error
