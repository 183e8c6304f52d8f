"""What is left for KV blocks on a GPU that only counts, and the step that it is asked to hold."""

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from mini_infer.core.errors import OutOfMemoryError
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.modeling import memory_profile
from mini_infer.modeling.kv_memory import bytes_per_block
from mini_infer.modeling.memory_profile import (
    SLACK,
    largest_step,
    largest_steps,
    num_blocks_beside_steps,
)
from mini_infer.modeling.step_graphs import StepGraphs
from tests.modeling.test_kernel_warm_up import LIMITS, loaded
from tests.runtime.fake_executor import make_config

STEP, GRAPHS, HELD = 3 * 2**20, 5 * 2**20, 7 * 2**20


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_largest_step_has_all_rows_and_tokens_that_there_can_be(limits: dict[str, Any]) -> None:
    config = make_config(**limits)
    batch = largest_step(config)
    lengths = [chunk.num_new_tokens for chunk in batch.chunks]
    assert len(lengths) == min(config.max_num_seqs, config.max_step_tokens)
    assert all(1 <= length < config.max_model_len for length in lengths)
    most = min(config.max_step_tokens, len(lengths) * (config.max_model_len - 1))
    assert sum(lengths) == most
    for chunk in batch.chunks:
        assert chunk.num_computed_tokens + chunk.num_new_tokens == config.max_model_len - 1
        assert len(chunk.new_block_ids) == -(-chunk.num_new_tokens // config.block_size)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_largest_verification_has_all_rows_and_drafts(limits: dict[str, Any]) -> None:
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    config = make_config(**limits, speculative_config=speculation)
    steps = list(largest_steps(config))
    assert steps[0] == largest_step(config)
    for batch in steps[1:]:
        most = config.max_step_tokens
        assert len(batch.chunks) == min(64, config.max_num_seqs, most // 2)
        for chunk in batch.chunks:
            assert 1 <= chunk.num_drafts <= 5
            assert chunk.num_new_tokens == 1 + chunk.num_drafts
            assert chunk.num_computed_tokens == config.max_model_len - 2
        assert batch.num_tokens <= most
        assert batch.num_tokens + len(batch.chunks) > most or chunk.num_drafts == 5
    assert len(steps) == 1 + (config.max_step_tokens > 1)


def blocks_of(monkeypatch: pytest.MonkeyPatch, total: int, **options: Any) -> int:
    runner = loaded(kv_cache_memory=None, num_kv_blocks=None, **options)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - HELD, total))
    monkeypatch.setattr(memory_profile, "_graph_bytes", lambda runner: GRAPHS)
    monkeypatch.setattr(memory_profile, "_step_bytes", lambda runner: STEP)
    count = num_blocks_beside_steps(runner)
    assert not runner.caches
    return count


def test_blocks_fill_the_share_and_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    size = bytes_per_block(config, config.model_config.kv_layout, torch.float32)
    room = 100 * size
    total = 2 * (HELD + GRAPHS + STEP + SLACK + room)
    count = blocks_of(monkeypatch, total, gpu_memory_utilization=0.5)
    assert count == 100 - 1, "one block is the graphs' own"


def test_no_more_blocks_than_all_requests_could_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    demand = config.max_num_seqs * config.max_blocks_per_request
    assert blocks_of(monkeypatch, 2**37) == demand


def test_too_little_memory_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OutOfMemoryError, match=r"raise gpu_memory_utilization \(0.5\)"):
        blocks_of(monkeypatch, 2**25, gpu_memory_utilization=0.5)


class CountingGPU:
    """Counts the memory of graphs, and what the steps before each recording leave cached."""

    has_graphs = True

    def __init__(self) -> None:
        self.held: WeakKeyDictionary[CountingGraphs, int] = WeakKeyDictionary()
        self.cached = 0

    def new_graphs(self) -> StepGraphs:
        graphs: list[Any] = [CountingGraphs(self) for _ in StepGraphs._fields]
        return StepGraphs(*graphs)

    def empty_cache(self) -> None:
        self.cached = 0

    def mem_get_info(self) -> tuple[int, int]:
        return 10**6 - sum(self.held.values()) - self.cached, 10**6


class CountingGraphs:
    """The largest takes a thousand, each one ten."""

    sizes = shapes = (1, 2, 4, 8)

    def __init__(self, gpu: CountingGPU) -> None:
        self._gpu = gpu

    def capture(self, which: tuple[int, ...]) -> None:
        held = self._gpu.held.get(self, 0)
        self._gpu.held[self] = held + 1000 * (8 in which) + 10 * len(which)
        self._gpu.cached += 500

    def record(self, shape: int) -> None:
        self.capture((shape,))


def test_graphs_take_what_the_largest_do_and_a_little_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu: Any = CountingGPU()
    monkeypatch.setattr(torch.cuda, "mem_get_info", gpu.mem_get_info)
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.empty_cache)
    kinds = len(StepGraphs._fields)
    assert memory_profile._graph_bytes(gpu) == kinds * 1010 + 10 * kinds * (4 - 1)
    assert not gpu.held
    gpu.has_graphs = False
    assert memory_profile._graph_bytes(gpu) == 0
