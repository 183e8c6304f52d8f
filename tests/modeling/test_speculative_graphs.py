"""Steps with drafts as graphs: without a GPU, what they would replay gives the same tokens."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.modeling import speculative_graphs
from mini_infer.modeling.chunk_graphs import ChunkGraphs
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.agreed import agreed
from mini_infer.modeling.speculative_graphs import (
    ProposeGraphs,
    SampledPlaces,
    Shape,
    VerifyGraphs,
    most_samples,
    row_sizes,
    shapes_of,
    smallest,
)
from mini_infer.modeling.speculative_step import StepRows
from mini_infer.modeling.step_layout import StepLayout
from tests.modeling.graphs_on_cpu import replay_graphs
from tests.runtime.engine_tools import generate
from tests.runtime.fake_executor import make_config
from tests.runtime.tiny_model import tiny_engine

HALF_RIGHT = SpeculativeConfig(
    method="tests.modeling.half_right:HalfRight",
    num_speculative_tokens=3,
    adaptive=False,
    num_layers=2,
    on_device=True,
)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)
PROMPTS = [[7, 8, 9] * 5, [1], [5, 6, 7, 8] * 3, [9, 9, 9, 2], [3] * 11]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=11, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.02, seed=5, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
]


def test_shapes() -> None:
    config = make_config(max_num_seqs=6, speculative_config=NGRAM)
    assert row_sizes(config) == [1, 2, 4, 6]
    assert most_samples(config) == 24
    assert NGRAM.draft_counts == (0, 1, 2, 3)
    shapes = shapes_of(config, NGRAM.draft_counts)
    assert len(shapes) == 16
    assert shapes[-1] == (6, 3)
    assert smallest(shapes, 3, 2) == (4, 2)
    assert smallest(shapes, 5, 0) == (6, 0)
    assert smallest(shapes, 7, 0) is None
    assert smallest(shapes, 1, 4) is None
    config = make_config(max_num_seqs=500, speculative_config=NGRAM)
    assert row_sizes(config)[-1] == 64
    assert row_sizes(make_config()) == []
    assert most_samples(make_config()) == 0


EDITING = [
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=9),
    SamplingParams(temperature=1.0, seed=5, presence_penalty=0.5, min_p=0.02, max_tokens=8),
    SamplingParams(temperature=0.0, min_tokens=6, max_tokens=12, logit_bias={65: 3.0}),
    SamplingParams(temperature=0.8, seed=2, allowed_token_ids=list(range(40)), max_tokens=12),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=10),
]


def outputs(params: list[SamplingParams], **options: Any) -> list[list[int]]:
    return generate(tiny_engine(max_num_seqs=6, **options), PROMPTS, params)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Shapes of the verifications that are replayed."""
    shapes: list[Shape] = []
    run = VerifyGraphs.run

    def noted(graphs: VerifyGraphs, shape: Shape, layout: StepLayout) -> StepRows:
        shapes.append(shape)
        return run(graphs, shape, layout)

    monkeypatch.setattr(VerifyGraphs, "run", noted)
    return shapes


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("speculation", [HALF_RIGHT, NGRAM], ids=["device", "host"])
@pytest.mark.parametrize("params", [PARAMS, EDITING, [*PARAMS[:3], *EDITING[:2]]])
def test_replays_give_the_tokens_of_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
    verified: list[Shape],
    params: list[SamplingParams],
    speculation: SpeculativeConfig,
    depth: int,
) -> None:
    """Whatever drafts are accepted, wherever rows begin, and whoever samples: graph or host."""
    expected = outputs(params)
    replay_graphs(monkeypatch)
    assert outputs(params) == expected
    assert outputs(params, speculative_config=speculation, depth=depth) == expected
    assert {num_drafts for _, num_drafts in verified} >= {3}
    assert len({num_rows for num_rows, _ in verified}) > 1


def test_a_proposer_that_no_graph_can_hold_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_graphs(monkeypatch)

    def record(step: Callable[[], None], pool: Any, **_: bool) -> None:
        if isinstance(getattr(step, "func").__self__, ProposeGraphs):  # noqa: B009
            raise torch.AcceleratorError("operation not permitted when stream is capturing")

    monkeypatch.setattr(speculative_graphs, "record", record)
    with pytest.raises(InvalidConfigError, match=r"HalfRight can't be recorded .*not permitted"):
        tiny_engine(speculative_config=HALF_RIGHT)
    with pytest.raises(torch.AcceleratorError):
        tiny_engine(speculative_config=replace(HALF_RIGHT, method="early_exit", num_layers=1))


@pytest.mark.parametrize(("at_once", "rehearsed"), [(False, {0, 1, 2}), (True, {0, 1, 2, 3})])
def test_each_number_of_drafts_of_one_pass_is_rehearsed(
    at_once: bool, rehearsed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks, too."""
    config = make_config(speculative_config=HALF_RIGHT)
    device = torch.device("cpu")
    state, sampled = DeviceState(config, device), SampledPlaces.empty(config, torch.float32, device)
    proposer: Any = SimpleNamespace(drafts_at_once=at_once)
    group: Any = SimpleNamespace(size=2)
    pool: Any = None
    graphs = ProposeGraphs(config, state, agreed(proposer, group), sampled, pool)
    launched: list[Shape] = []
    monkeypatch.setattr(graphs, "_step", launched.append)
    graphs.rehearse()
    assert {num_drafts for _, num_drafts in launched} == rehearsed


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_beside_prompts_are_replayed_too(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Each as a row of its own, while chunks of longer prompts are computed."""
    prompts = [*PROMPTS[:3], list(range(1, 60)), [4] * 47, *PROMPTS[:3]]
    params = [*PARAMS[:3], *PARAMS]

    def run(**options: Any) -> list[list[int]]:
        engine = tiny_engine(max_num_seqs=20, max_num_batched_tokens=16, depth=depth, **options)
        return generate(engine, prompts, params)

    expected = run()
    replay_graphs(monkeypatch)
    replayed: list[int] = []
    run_with_drafts = ChunkGraphs.run_with_drafts

    def noted(graphs: ChunkGraphs, layout: StepLayout) -> tuple[Tensor, Tensor] | None:
        replayed.append(sum(layout.num_drafts))
        return run_with_drafts(graphs, layout)

    monkeypatch.setattr(ChunkGraphs, "run_with_drafts", noted)
    monkeypatch.setattr(DeviceState, "lay_out", None)
    assert run(speculative_config=HALF_RIGHT) == expected
    assert sum(count > 0 for count in replayed) >= 2


@given(
    params=st.permutations([*PARAMS, *EDITING]),
    num_drafts=st.sampled_from([1, 2, 5]),
    depth=st.integers(1, 3),
    block_size=st.sampled_from([1, 4, 16]),
    num_blocks=st.sampled_from([40, 1000]),
    budget=st.sampled_from([3, 16, 100]),
    max_model_len=st.sampled_from([30, 64]),
    on_device=st.booleans(),
)
@settings(max_examples=6)
def test_replays_at_any_limits(
    params: list[SamplingParams],
    num_drafts: int,
    depth: int,
    block_size: int,
    num_blocks: int,
    budget: int,
    max_model_len: int,
    on_device: bool,
) -> None:
    """Small pools preempt, small budgets cut drafts, and requests end at the model's length."""
    limits: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_blocks": num_blocks // block_size,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
    }
    expected = outputs(params[: len(PROMPTS)], **limits)
    speculation = replace(HALF_RIGHT if on_device else NGRAM, num_speculative_tokens=num_drafts)
    with pytest.MonkeyPatch.context() as patch:
        replay_graphs(patch)
        found = outputs(
            params[: len(PROMPTS)], speculative_config=speculation, depth=depth, **limits
        )
    assert found == expected
