"""Users' proposers on the device, also careless ones."""

from typing import Any

import numpy as np
import pytest
import torch

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.errors import OutOfMemoryError, ProposerError
from mini_infer.modeling.proposers.guarded import guarded
from mini_infer.modeling.proposers.proposer import DraftRows, FollowingProposer

VOCAB_SIZE = 100


class Scripted:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def propose(self, rows: DraftRows, num_drafts: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Following(Scripted):
    def follow(self, batch: ScheduledBatch) -> None:
        raise KeyError("a slot")


def propose(answer: Any) -> torch.Tensor:
    index = torch.arange(2)
    rows = DraftRows(index, index, index, torch.zeros(2, 8))
    return guarded(Scripted(answer), "mine:Drafts", VOCAB_SIZE).propose(rows, 3)


def test_drafts_are_passed_on() -> None:
    drafts = torch.tensor([[1, 2, 3], [4, 5, 99]])
    assert torch.equal(propose(drafts), drafts)


def test_what_is_no_token_never_becomes_an_input() -> None:
    drafts = propose(torch.tensor([[-5, 2, 100], [2**62, 5, -(2**63)]]))
    assert drafts.tolist() == [[0, 2, 99], [99, 5, 0]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned a NoneType"),
        (np.zeros((2, 3), dtype=np.int64), "returned a ndarray"),
        (torch.zeros(2, 4, dtype=torch.int64), r"must return \[2, 3\] .*, and returned \[2, 4\]"),
        (torch.zeros(1, 1, dtype=torch.int64), r"returned \[1, 1\]"),  # it would be broadcast
        (torch.zeros(2, 3), "returned .* torch.float32"),
        (torch.zeros(2, 3, dtype=torch.int32), "returned .* torch.int32"),
        (torch.zeros(2, 3, dtype=torch.int64, device="meta"), "on cpu, and returned .* on meta"),
        (RuntimeError("no idea"), "RuntimeError: no idea"),
    ],
)
def test_other_answers_are_errors_that_name_the_proposer(answer: Any, message: str) -> None:
    with pytest.raises(ProposerError, match=rf"mine:Drafts, method propose\(\): .*{message}"):
        propose(answer)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), OutOfMemoryError("full")])
def test_too_little_memory_is_the_profilers_affair(error: Exception) -> None:
    with pytest.raises(type(error), match="full"):
        propose(error)


def test_one_that_follows_still_does() -> None:
    proposer = guarded(Following(None), "mine:Drafts", VOCAB_SIZE)
    assert isinstance(proposer, FollowingProposer)
    batch = ScheduledBatch(step_id=0, chunks=[])
    with pytest.raises(ProposerError, match=r"mine:Drafts, method follow\(\): KeyError: 'a slot'"):
        proposer.follow(batch)
    assert not isinstance(guarded(Scripted(None), "mine:Drafts", VOCAB_SIZE), FollowingProposer)
