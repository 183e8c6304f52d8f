"""The end of a step as a graph draws what the sampler does, whatever stands in the surplus rows."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling import sampling_graphs
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.sampler import Sampler
from mini_infer.modeling.sampling_graphs import SamplingGraphs, powers_of_two
from mini_infer.modeling.step_layout import StepLayout
from tests.runtime.fake_executor import make_config

pytest.importorskip("triton")

CONFIG = make_config(max_num_seqs=6, max_model_len=64)
VOCAB, HIDDEN = CONFIG.model_config.vocab_size, 8
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])],
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert powers_of_two(most) == sizes


class Head:
    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))

    def compute_logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(x, self.weight.t(), out=out)


class Replayed:
    """Runs the step anew, as a graph does."""

    def __init__(self, step: Callable[[], None], pool: Any) -> None:
        self._step = step

    @torch.inference_mode()
    def replay(self) -> None:
        self._step()


def batch() -> ScheduledBatch:
    """Three rows that are sampled, between others that are not."""
    params = [SamplingParams(temperature=0.9, top_k=top_k) for top_k in (-1, 5, 9, -1, 3)]
    return ScheduledBatch(
        step_id=0,
        chunks=tuple(
            Chunk(str(slot), slot, 0, slot + 2, samples=slot not in (0, 3)) for slot in range(5)
        ),
        admissions=tuple(
            Admission(str(slot), slot, (1,) * (slot + 2), slot + 2, each, seed=slot)
            for slot, each in enumerate(params)
        ),
    )


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_replay_draws_what_the_sampler_does(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    monkeypatch.setattr(sampling_graphs, "record", Replayed)
    head, state, step = Head(), DeviceState(CONFIG, CPU), batch()
    state.take_in(step)
    state.sampling.admit(step.admissions)
    hidden = torch.full((CONFIG.max_num_seqs + 1, HIDDEN), 1e3)
    logits = torch.full((CONFIG.max_num_seqs, VOCAB), torch.nan)
    graphs = SamplingGraphs(CONFIG, head, state, hidden, logits, None)  # type: ignore[arg-type]
    graphs.capture()
    x, layout = torch.randn(5, HIDDEN), StepLayout.of(step)
    if in_place:
        x = hidden[:5].copy_(x)
    token_ids, found = graphs.run(x, layout)
    expected = x[[1, 2, 4]] @ head.weight.t()
    slots, positions = layout.sampling_slots, layout.sampling_positions
    drawn = Sampler()(expected, slots, positions, state.token_table, state.sampling).token_ids
    assert torch.allclose(found, expected, atol=1e-5)
    assert token_ids.tolist() == drawn.tolist()
    assert state.token_table[slots, positions].tolist() == drawn.tolist()
