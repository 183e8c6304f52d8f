"""Admission: what a slot's columns hold, and how much work a step's admissions are."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mini_infer.core.batch import Admission
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels.sampling import INTEGERS, REALS, splitmix64
from mini_infer.modeling.sampling_state import SamplingState
from tests.modeling.sampler_oracle import CPU, admit

VOCAB = 50
DEMANDING = {
    "bias": SamplingParams(logit_bias={3: 1.5, 4: -2.0}),
    "allowed": SamplingParams(allowed_token_ids=[1, 2, 99]),
    "bans": SamplingParams(min_tokens=4),
    "plain": SamplingParams(temperature=0.6, top_k=9, top_p=0.9, min_p=0.1),
}


def admission(slot: int, name: str) -> Admission:
    extra: dict[str, Any] = {}
    if name == "bans":
        extra = {"stop_token_ids": (5, 6), "bad_words_token_ids": ((1, 2, 3), (7,))}
    return admit(slot, DEMANDING[name], (1, 2, 3), 2, seed=slot + 40, **extra)


class Operations(TorchDispatchMode):
    """Counts what torch executes."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations_of(admissions: list[Admission]) -> int:
    state = SamplingState(len(admissions), VOCAB, CPU)
    with Operations() as operations:
        state.admit(admissions)
    return operations.count


@pytest.mark.parametrize("name", DEMANDING)
def test_many_admissions_are_as_many_operations_as_one(name: str) -> None:
    many = [admission(slot, name) for slot in range(20)]
    assert operations_of(many) == operations_of(many[:1])


def test_a_step_without_admissions_does_nothing() -> None:
    assert operations_of([]) == 0


def test_admitted_together_or_one_by_one() -> None:
    admissions = [admission(slot, name) for slot, name in enumerate([*DEMANDING] * 2)]
    order = np.random.default_rng(0).permutation(len(admissions)).tolist()
    together, single = (SamplingState(len(admissions), VOCAB, CPU) for _ in range(2))
    together.admit([admissions[index] for index in order])
    for one in admissions:
        single.admit([one])
    for name, value in vars(together).items():
        if isinstance(value, torch.Tensor | np.ndarray):
            assert (value == getattr(single, name)).all(), name


def test_columns_of_a_slot() -> None:
    state = SamplingState(2, VOCAB, CPU)
    state.admit([admission(1, "plain")])
    expected = {"temperature": 0.6, "top_p": 0.9, "log_min_p": np.log(0.1), "repetition": 1.0}
    for index, name in enumerate(REALS):
        assert state.reals[1, index].item() == expected.get(name, 0.0)
    assert state.integers[1].tolist() == [splitmix64(41), 2, 9]
    assert len(INTEGERS) == 3


def test_plain_requests_leave_the_lists_alone() -> None:
    state = SamplingState(4, VOCAB, CPU)
    state.admit([admission(slot, "plain") for slot in range(4)])
    tables = (state.bias_ids, state.bias_values, state.ban_ids, state.ban_prefixes, state.allowed)
    assert not any(table.numel() for table in tables)


def test_what_graphs_read_keeps_its_address() -> None:
    state = SamplingState(8, VOCAB, CPU)
    fixed = (state.reals, state.integers, state.token_hashes)
    before = [tensor.data_ptr() for tensor in fixed]
    for name in DEMANDING:
        state.admit([admission(slot, name) for slot in range(8)])
    assert [t.data_ptr() for t in (state.reals, state.integers, state.token_hashes)] == before


def test_the_surplus_slot_is_greedy_and_nobodys() -> None:
    state = SamplingState(3, VOCAB, CPU)
    state.admit([admission(slot, "plain") for slot in range(3)])
    assert dict(zip(REALS, state.reals[3].tolist(), strict=True)) == {
        "temperature": 0.0,
        "top_p": np.inf,
        "log_min_p": -np.inf,
        "repetition": 1.0,
        "presence": 0.0,
        "frequency": 0.0,
    }
    assert state.integers[3].tolist() == [0] * len(INTEGERS)


def test_needs_edits() -> None:
    names = [*DEMANDING]
    state = SamplingState(len(names) + 1, VOCAB, CPU)
    state.admit([admission(slot, name) for slot, name in enumerate(names)])
    state.admit([admit(len(names), SamplingParams(logprobs=0))])

    def needs(*slots: int, num_tokens: int = 3) -> bool:
        return state.needs_edits(np.array(slots), np.full(len(slots), num_tokens))

    plain = names.index("plain")
    assert not needs(plain)
    assert not needs(plain, state.num_slots)
    assert all(needs(plain, slot) for slot in range(len(names) + 1) if slot != plain)


def test_bans_that_are_over_need_no_edits() -> None:
    state = SamplingState(1, VOCAB, CPU)
    state.admit([admit(0, SamplingParams(min_tokens=4), (1, 2), 2, stop_token_ids=(5,))])
    slot = np.array([0])
    assert state.needs_edits(slot, np.array([5]))
    assert not state.needs_edits(slot, np.array([6]))
