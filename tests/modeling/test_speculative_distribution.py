"""Speculation as a distribution: what is sampled is the target's, whoever proposes.

Target and drafter are Markov chains over five tokens, so that the exact distribution of an output
is known; the steps are the engine's own, for tens of thousands of requests at once.
"""

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.modeling.sampler import Sampler
from mini_infer.modeling.speculative_step import SpeculativeSteps, StepRows, first_samples
from mini_infer.modeling.step_layout import StepLayout
from tests.modeling.fakes import tiny_config
from tests.runtime.fake_executor import make_config

VOCAB, LENGTH, NUM_DRAFTS = 5, 3, 2
CPU = torch.device("cpu")
SMALL, LARGE = 10_000, 100_000
ROWS = 50_000
"""Most requests at once; each takes a slot."""
TARGET = torch.tensor(
    [
        [2.0, 1.0, 0.0, -1.0, 0.5],
        [0.0, 1.5, 0.3, 0.8, -0.7],
        [-1.0, 0.0, 2.0, 0.4, 0.9],
        [0.6, 0.6, -0.5, 0.0, 1.4],
        [1.0, -0.8, 0.2, 1.1, 0.0],
    ]
)
DRAFT = 0.4 * TARGET + torch.tensor([0.0, 0.8, -0.3, 0.5, -0.6])


def outputs_of(chain: Tensor) -> Tensor:
    """``[VOCAB ** LENGTH]``: the probability of each output behind token 0."""
    step = chain.double().softmax(-1)
    outputs = step[0]
    for _ in range(LENGTH - 1):
        last = torch.arange(len(outputs)) % VOCAB
        outputs = (outputs[:, None] * step[last]).flatten()
    return outputs


class Drafter:
    """Draws from ``DRAFT``, with the requests' own noise or with that of ``shift`` places on."""

    def __init__(self, state: DeviceState, shift: int = 0) -> None:
        self._state, self._shift, self._sampler = state, shift, Sampler()

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        token_ids, places, drafts = rows.token_ids, rows.positions, []
        for _ in range(num_drafts):
            places = places + 1
            token_ids = self._sampler.draw_drafts(
                DRAFT[token_ids], rows.slots, places + self._shift, self._state.sampling
            )
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1)


class Constant:
    """Always the same draft, likely in some places and unlikely in others."""

    def __init__(self, state: DeviceState) -> None:
        del state

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        return torch.full((len(rows.slots), num_drafts), 2)


DRAFTERS: dict[str, Callable[[DeviceState], object]] = {
    "coupled": Drafter,
    "independent": lambda state: Drafter(state, shift=1000),
    "constant": Constant,
}


@cache
def sampled(drafter: str, count: int) -> tuple[Tensor, float]:
    """``count`` outputs as indices into ``outputs_of``, and how many first drafts were accepted."""
    runs = [run(drafter, seed, min(count, ROWS)) for seed in range(0, count, ROWS)]
    accepted = sum(share for _, share in runs) / len(runs)
    return torch.cat([outputs for outputs, _ in runs]), accepted


@torch.inference_mode()
def run(drafter: str, first_seed: int, num_rows: int) -> tuple[Tensor, float]:
    config = make_config(
        model_config=tiny_config(vocab_size=VOCAB),
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows * (1 + NUM_DRAFTS),
        max_model_len=16,
        speculative_config=SpeculativeConfig(
            method="m:C", num_speculative_tokens=NUM_DRAFTS, on_device=True, adaptive=False
        ),
    )
    state = DeviceState(config, CPU)
    steps = SpeculativeSteps(config, state, Sampler(), DRAFTERS[drafter](state))  # type: ignore[arg-type]
    params = SamplingParams(temperature=1.0, max_tokens=8)
    accepted = 0.0
    for step in range(LENGTH):  # each gives one token at least
        num_drafts = NUM_DRAFTS if step else 0
        batch = ScheduledBatch(
            step,
            tuple(
                # Its place is the device's to know; one more than the host would count is enough.
                Chunk(
                    "", slot, step, 1 + num_drafts, (), True, num_drafts, (), step == 0, NUM_DRAFTS
                )
                for slot in range(num_rows)
            ),
            tuple(
                Admission("", slot, (0,), 1, params, first_seed + slot)
                for slot in range(num_rows if step == 0 else 0)
            ),
        )
        state.take_in(batch)
        state.sampling.admit(batch.admissions)
        layout = state.with_known_starts(StepLayout.of(batch))
        places = torch.from_numpy(layout.sampling_positions)
        slots = torch.from_numpy(layout.sampling_slots)
        last = state.token_table[slots, places - 1].long()
        before = state.last_positions.clone()
        hidden = torch.zeros(len(places), 1)
        rows = StepRows(hidden, TARGET[last], places, first_samples(layout))
        steps.finish(batch, layout, rows)
        if step == 1:
            accepted = float((state.last_positions - before > 1)[:num_rows].double().mean())
    outputs = state.token_table[:num_rows, 1 : 1 + LENGTH].long()
    return (outputs * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1), accepted


def distance(outputs: Tensor, target: Tensor) -> float:
    counts = torch.bincount(outputs, minlength=len(target)).double()
    return float((counts / counts.sum() - target).abs().sum() / 2)


def expected_distance(target: Tensor, n: int) -> float:
    """Mean total variation of n true draws."""
    return float((2 * target * (1 - target) / (math.pi * n)).sqrt().sum() / 2)


def test_outputs_converge_to_the_target_and_not_to_the_draft() -> None:
    target, draft = outputs_of(TARGET), outputs_of(DRAFT)
    gap = float((target - draft).abs().sum() / 2)
    outputs, _ = sampled("coupled", LARGE)
    few, many = distance(outputs[:SMALL], target), distance(outputs, target)
    assert 0.7 * expected_distance(target, SMALL) < few < 1.4 * expected_distance(target, SMALL)
    assert 0.7 * expected_distance(target, LARGE) < many < 1.4 * expected_distance(target, LARGE)
    assert 0.7 * math.sqrt(LARGE / SMALL) < few / many < 1.4 * math.sqrt(LARGE / SMALL)
    assert distance(outputs, draft) > gap - 2 * expected_distance(target, LARGE) > 0.3


def test_outputs_are_the_same_whoever_proposes() -> None:
    """So what holds for the one holds for all."""
    first = sampled("coupled", LARGE)[0][:SMALL]
    assert all(torch.equal(first, sampled(drafter, SMALL)[0]) for drafter in DRAFTERS)


def test_acceptance_is_what_coupling_promises() -> None:
    """At least ``(1 - TV) / (1 + TV)`` (arXiv 2408.07978), and more than without coupling."""
    p, q = (chain.double().softmax(-1) for chain in (TARGET, DRAFT))
    first = p[0]  # the token behind which the first draft stands is the target's
    distances = (p - q).abs().sum(-1) / 2
    promised = float((first * (1 - distances) / (1 + distances)).sum())
    by_chance = float((first * (p * q).sum(-1)).sum())
    _, coupled = sampled("coupled", LARGE)
    _, independent = sampled("independent", SMALL)
    assert coupled > promised - 0.01
    assert independent == pytest.approx(by_chance, abs=0.02)
    assert coupled > independent + 0.1
