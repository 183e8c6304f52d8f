"""The steps that start-up rehearses are steps that a runner can run, however small its limits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.modeling import chunk_graphs, cuda_graphs
from mini_infer.modeling.chunk_graphs import ChunkGraphs
from mini_infer.modeling.cuda_graphs import DecodeGraphs
from mini_infer.modeling.kernel_warm_up import TILED_ROW, compile_kernels, rehearse, small_step
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.step_result import LocalStep, MaskedStep
from tests.modeling.graphs_on_cpu import Replayed, replay_graphs
from tests.runtime.fake_executor import TINY_MODEL, make_config

SPECULATIONS = [
    SpeculativeConfig(
        method="tests.modeling.half_right:HalfRight",
        num_speculative_tokens=3,
        num_layers=2,
        on_device=True,
    ),
    SpeculativeConfig(method="ngram", num_speculative_tokens=3),
]
LIMITS: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 1},
    {"max_model_len": 2},
    {"max_num_seqs": 2, "max_num_batched_tokens": 2},
    {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    {"block_size": 1},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(
    "lengths", [(1,), (TILED_ROW, 3), (TILED_ROW, 9, 1), (TILED_ROW, *[1] * 66)]
)
def test_a_small_step_keeps_to_the_limits(limits: dict[str, Any], lengths: tuple[int, ...]) -> None:
    config = make_config(**limits)
    chunks = small_step(config, lengths).chunks
    assert 1 <= len(chunks) <= min(len(lengths), config.max_num_seqs)
    assert sum(chunk.num_new_tokens for chunk in chunks) <= config.max_step_tokens
    for chunk in chunks:
        assert 1 <= chunk.num_new_tokens < config.max_model_len
        assert len(chunk.new_block_ids) * config.block_size >= chunk.num_new_tokens


def test_a_small_step_is_what_was_asked_for_where_it_fits() -> None:
    """Many rows in a narrow budget make no short row of the tiled one."""
    config = make_config(max_num_seqs=256, max_num_batched_tokens=256)
    lengths = (TILED_ROW, 5, *[1] * 132)
    chunks = small_step(config, lengths).chunks
    assert tuple(chunk.num_new_tokens for chunk in chunks) == lengths


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("speculation", [None, *SPECULATIONS], ids=["plain", "device", "host"])
def test_rehearsed_steps_run(speculation: SpeculativeConfig | None, limits: dict[str, Any]) -> None:
    runner = loaded(speculative_config=speculation, **limits)
    rehearse(runner)
    assert not runner.caches


def test_each_kernel_of_short_rows_beside_a_chunk_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = pytest.importorskip("mini_infer.kernels.triton")
    runner = loaded(max_num_seqs=8, max_num_batched_tokens=64)
    execute, steps = runner.execute, []

    def noted(batch: ScheduledBatch) -> LocalStep | MaskedStep:
        steps.append([chunk.num_new_tokens for chunk in batch.chunks])
        return execute(batch)

    def short_rows(*arguments: Any) -> list[tuple[int, int]]:
        assert arguments[:4] == (4, 2, 4 * TINY_MODEL.head_dim, 7)
        return [(1, 1), (1, 6), (5, 2)]

    monkeypatch.setattr(kernels, "short_rows", short_rows)
    monkeypatch.setattr(runner, "execute", noted)
    rehearse(runner)
    assert [TILED_ROW, 1] in steps
    assert [TILED_ROW, *[1] * 6] in steps
    assert [TILED_ROW, 5, 1] in steps


@pytest.mark.parametrize("speculation", SPECULATIONS, ids=["device", "host"])
def test_steps_of_graphs_are_rehearsed(
    monkeypatch: pytest.MonkeyPatch, speculation: SpeculativeConfig
) -> None:
    replay_graphs(monkeypatch)
    rehearse(loaded(speculative_config=speculation))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_recorded_without_a_run_was_rehearsed(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the largest of each kind runs all the same, as does everything of several ranks."""
    replay_graphs(monkeypatch)
    runner = loaded(max_num_seqs=9, max_num_batched_tokens=600, max_model_len=128)
    launched: list[tuple[type, object]] = []
    recorded: dict[tuple[type, object], bool] = {}
    for kind in (DecodeGraphs, ChunkGraphs):

        def step(graphs: Any, shape: object, launch: Callable[..., None] = kind._step) -> None:
            launched.append((type(graphs), shape))
            launch(graphs, shape)

        monkeypatch.setattr(kind, "_step", step)

    def noted(step: Any, pool: Any, is_rehearsed: bool) -> Replayed:
        recorded[type(step.func.__self__), *step.args] = is_rehearsed
        return Replayed(step, pool)

    for module in (chunk_graphs, cuda_graphs):
        monkeypatch.setattr(module, "record", noted)
    rehearse(runner)
    rehearsed = set(launched)
    monkeypatch.setattr(EngineConfig, "num_ranks", num_ranks)
    runner.init_cache(80)
    runner.capture_graphs()
    assert {(DecodeGraphs, 9), (ChunkGraphs, (10, 600))} <= recorded.keys()
    without_run = {graph for graph, is_rehearsed in recorded.items() if is_rehearsed}
    if num_ranks > 1:
        assert not without_run
        return
    assert without_run <= rehearsed
    assert recorded.keys() - without_run == {
        (DecodeGraphs, 9),
        (ChunkGraphs, (10, 600)),
    }


def test_of_layers_that_launch_the_same_one_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last, which leaves out the tokens that nobody wants."""
    windows = (False, True, False, True, False, False)
    model = replace(TINY_MODEL, num_layers=6, sliding_window=8, sliding_layers=windows)
    runner = loaded(model_config=model)
    layers, execute = list(runner.model.layers), runner.execute
    rehearsed: set[tuple[int, ...]] = set()

    def noted(batch: ScheduledBatch) -> LocalStep | MaskedStep:
        rehearsed.add(tuple(layers.index(layer) for layer in runner.model.layers))
        assert len(runner.caches) == len(runner.model.layers)
        return execute(batch)

    monkeypatch.setattr(runner, "execute", noted)
    rehearse(runner)
    assert rehearsed == {(0, 1, 5)}
    assert list(runner.model.layers) == layers


def test_a_cpu_has_no_kernels_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded()
    monkeypatch.setattr(runner, "execute", None)
    compile_kernels(runner)


def loaded(**limits: Any) -> ModelRunner:
    runner = ModelRunner(make_config(**limits), ModelFiles(Path("none"), Path("none")))
    runner.load()
    return runner
