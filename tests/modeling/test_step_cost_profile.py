"""Costs of steps are measured for the drafts that there can be, and nothing is left of them."""

import math
from dataclasses import replace
from typing import Any

import pytest

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.modeling import step_cost_profile
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.step_cost_profile import measure_step_costs
from tests.modeling.graphs_on_cpu import replay_graphs
from tests.modeling.test_kernel_warm_up import loaded
from tests.modeling.test_speculative_graphs import HALF_RIGHT, NGRAM, PROMPTS
from tests.runtime.engine_tools import generate
from tests.runtime.tiny_model import tiny_engine

DEVICE = replace(HALF_RIGHT, adaptive=True)
HOST = replace(NGRAM, adaptive=True)


def started(**options: Any) -> ModelRunner:
    runner = loaded(**options)
    runner.init_cache(16)
    runner.capture_graphs()
    return runner


def check(costs: StepCosts, rows: tuple[int, ...], drafts: tuple[int, ...], proposes: bool) -> None:
    assert (costs.rows, costs.drafts) == (rows, drafts)
    for verify, propose in zip(costs.verify, costs.propose, strict=True):
        assert len(verify) == len(propose) == len(drafts)
        assert min(verify) > 0
        assert propose[0] == 0
        if proposes:
            assert min(propose[1:]) > 0
    assert len(costs.verify) == len(costs.propose) == len(rows)


@pytest.mark.parametrize(
    ("limits", "rows", "drafts"),
    [
        ({}, (1, 4, 8), (0, 1, 3)),
        ({"max_num_seqs": 1}, (1,), (0, 1, 3)),
        ({"max_model_len": 2}, (1, 4, 8), (0, 1, 3)),
        ({"block_size": 1}, (1, 4, 8), (0, 1, 3)),
        # No step is measured that can't be: a stage has no room for what another one sends.
        ({"max_num_batched_tokens": 23}, (1, 4, 5), (0, 1, 3)),
        ({"max_num_batched_tokens": 3}, (1,), (0, 1, 2)),
        ({"max_num_batched_tokens": 2}, (1,), (0, 1)),
        ({"max_num_batched_tokens": 1}, (1,), (0,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("speculation", [DEVICE, HOST], ids=["device", "host"])
def test_launched_steps(
    speculation: SpeculativeConfig,
    limits: dict[str, Any],
    rows: tuple[int, ...],
    drafts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_cost_profile, "MOST_SECONDS", math.inf)  # on a busy machine
    runner = started(speculative_config=speculation, **limits)
    execute, most = runner.execute, runner.config.max_step_tokens

    def checked(batch: ScheduledBatch) -> Any:
        assert batch.num_tokens <= most
        return execute(batch)

    monkeypatch.setattr(runner, "execute", checked)
    costs = measure_step_costs(runner)
    assert costs is not None
    check(costs, rows, drafts, proposes=speculation.on_device and drafts != (0,))
    state = runner.state
    assert not any(t.any() for t in (state.token_table, state.last_positions, state.kv_limits))
    assert not any(cache[:16].any() for caches in runner.caches for cache in caches)


def test_replayed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_graphs(monkeypatch)
    replays: list[Any] = []

    def seconds(replay: Any) -> float:
        replay()
        replays.append(replay)
        return 0.5 + 0.01 * len(replays)

    monkeypatch.setattr(step_cost_profile, "_device_seconds", seconds)
    for speculation in (DEVICE, HOST):
        runner = started(speculative_config=speculation)
        costs = measure_step_costs(runner)
        assert costs is not None
        check(costs, (1, 4, 8), (0, 1, 2, 3), proposes=speculation.on_device)
        assert not any(cache[:16].any() for caches in runner.caches for cache in caches)


def test_measured_costs_decide_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=14)
    expected = generate(tiny_engine(), PROMPTS, params)
    assert generate(tiny_engine(speculative_config=DEVICE), PROMPTS, params) == expected


def test_where_nobody_asks_nothing_is_measured() -> None:
    assert measure_step_costs(started()) is None
    assert measure_step_costs(started(speculative_config=NGRAM)) is None
