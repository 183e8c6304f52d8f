"""Which graph a decode step replays, and what it reads, without a GPU."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch

from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.kernels import ops
from mini_infer.modeling.cuda_graphs import DecodeGraphs, graph_sizes
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.step_layout import StepLayout
from tests.runtime.fake_executor import TINY_MODEL, make_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 63, 64, 100, 256, 1000, 2**16])
def test_sizes_rise_to_the_largest_batch_and_pad_little(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_rows)
    assert len(sizes) < 100
    for smaller, larger in pairwise(sizes):
        assert larger - smaller - 1 <= max(7, larger // 8)


def decode(slots: Iterable[int], starts: Iterable[int]) -> StepLayout:
    chunks = [Chunk(str(slot), slot, start, 1) for slot, start in zip(slots, starts, strict=True)]
    return StepLayout.of(ScheduledBatch(0, tuple(chunks)))


class FakeGraph:
    """Notes what its inputs held when it was replayed, and draws the numbers of the rows."""

    def __init__(self, graphs: DecodeGraphs, size: int) -> None:
        self._graphs, self._size = graphs, size
        self.seen: list[tuple[list[int], list[int]]] = []
        self.interrupted = False

    def replay(self) -> None:
        graphs, size = self._graphs, self._size
        slots, starts, turn = graphs._views(size)
        self.seen.append((slots.tolist(), starts.tolist()))
        null_slot = graphs._state.null_slot
        ops.publish_(torch.arange(size), slots, starts, null_slot, graphs._results, turn)
        if self.interrupted:
            raise KeyboardInterrupt


@pytest.fixture
def graphs() -> DecodeGraphs:
    config = make_config(max_num_seqs=12)
    state, logits = DeviceState(config, CPU), torch.zeros(12, TINY_MODEL.vocab_size)
    graphs = DecodeGraphs(config, None, [], state, logits, None)  # type: ignore[arg-type]
    assert graphs.sizes == [1, 2, 4, 8, 12]
    fakes = {size: FakeGraph(graphs, size) for size in graphs.sizes}
    graphs._graphs |= fakes  # type: ignore[arg-type]
    return graphs


def seen(graphs: DecodeGraphs, size: int) -> list[tuple[list[int], list[int]]]:
    return graphs._graphs[size].seen  # type: ignore[attr-defined, no-any-return]


def test_surplus_rows_are_nobodys(graphs: DecodeGraphs) -> None:
    graphs.run(decode(range(12), range(100, 112)))
    token_ids, logits = graphs.run(decode([7, 3, 5], [20, 30, 40]))
    assert seen(graphs, 4) == [([7, 3, 5, graphs._state.null_slot], [20, 30, 40, 0])]
    assert token_ids.tolist() == [0, 1, 2]
    assert logits.shape == (3, TINY_MODEL.vocab_size)
    assert [size for size in graphs.sizes if seen(graphs, size)] == [4, 12]


def test_inputs_go_up_only_where_the_device_could_not_count_them(
    graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []
    write = graphs._write
    monkeypatch.setattr(graphs, "_write", lambda *a: (writes.append(a[1:]), write(*a)))
    steps = [
        ([7, 3, 5], [20, 30, 40]),
        ([7, 3, 5], [21, 31, 41]),
        ([7, 3, 5], [22, 32, 42]),
        ([7, 3, 5], [24, 34, 44]),  # a step with a chunk came between
        ([7, 5], [25, 45]),
        ([7, 5], [26, 46]),
        ([7, 3, 5], [25, 35, 45]),
    ]
    for slots, starts in steps:
        graphs.run(decode(slots, starts))
    assert writes == [steps[0], steps[3], steps[4], steps[6]]
    null = graphs._state.null_slot
    assert seen(graphs, 4) == [
        ([*slots, null], [*starts, 0]) for slots, starts in steps if len(slots) == 3
    ]
    assert seen(graphs, 2) == steps[4:6]


def test_tokens_stay_until_those_of_all_steps_in_flight_came(graphs: DecodeGraphs) -> None:
    first, _ = graphs.run(decode([1, 2], [5, 6]))
    graphs._results[1:] = 99
    for start in range(graphs._config.depth):
        graphs.run(decode([4], [start]))
        assert first.tolist() == [0, 1]


@pytest.mark.parametrize("change", [[1, 2], [2, 1]], ids=["same rows", "other rows"])
def test_after_ctrl_c_the_device_is_told_where_it_stands(
    graphs: DecodeGraphs, change: list[int]
) -> None:
    """It comes as a replay returns, say: the device has counted on, the host has not."""
    fake: FakeGraph = graphs._graphs[2]  # type: ignore[assignment]
    graphs.run(decode([1, 2], [5, 6]))
    fake.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        graphs.run(decode([1, 2], [6, 7]))
    fake.interrupted = False
    for start in range(6, 12):
        graphs._results[:] = 99
        token_ids, _ = graphs.run(decode(change, [start, start]))
        assert token_ids.tolist() == [0, 1]
        assert fake.seen[-1] == (change, [start, start])
