"""Which graph a decode step replays, and what it reads, without a GPU."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from mini_infer.modeling.cuda_graphs import DecodeGraphs, graph_sizes
from mini_infer.modeling.device_state import DeviceState
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


class FakeGraph:
    """Notes what its inputs held when it was replayed."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self._inputs = inputs
        self.seen: list[list[int]] = []

    def replay(self) -> None:
        self.seen.append(self._inputs.tolist())


def test_surplus_rows_are_nobodys() -> None:
    config = make_config(max_num_seqs=12)
    state = DeviceState(config, CPU)
    graphs = DecodeGraphs(config, None, [], state, torch.float32, None)  # type: ignore[arg-type]
    assert graphs.sizes == [1, 2, 4, 8, 12]
    replayed = {size: FakeGraph(graphs._inputs) for size in graphs.sizes}
    graphs._graphs |= replayed  # type: ignore[arg-type]
    graphs._token_ids |= {size: torch.arange(size) for size in graphs.sizes}
    graphs.run(np.arange(12), np.arange(100, 112))
    token_ids, logits = graphs.run(np.array([7, 3, 5]), np.array([20, 30, 40]))
    (seen,) = replayed[4].seen
    assert seen[:8] == [7, 3, 5, state.null_slot, 20, 30, 40, 0]
    assert token_ids.tolist() == [0, 1, 2]
    assert logits.shape == (3, TINY_MODEL.vocab_size)
    assert [size for size, graph in replayed.items() if graph.seen] == [4, 12]
