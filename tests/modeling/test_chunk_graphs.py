"""What a graph of a step with chunks reads, without a GPU: padding must change nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels import reference
from mini_infer.modeling import chunk_graphs
from mini_infer.modeling.chunk_graphs import ChunkGraphs
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.step_layout import StepLayout
from mini_infer.parallel.group import SINGLE
from tests.runtime.fake_executor import make_config

CONFIG = make_config(max_num_seqs=20, max_model_len=64, block_size=4, max_num_batched_tokens=100)
CPU = torch.device("cpu")


def state_with(batch: ScheduledBatch) -> DeviceState:
    state = DeviceState(CONFIG, CPU)
    state.set_null_block(99)
    state.take_in(batch)
    return state


def step() -> ScheduledBatch:
    """A prompt's first chunk, the end of one whose head was cached, and a decode."""
    sizes = {0: (0, 7), 3: (8, 5), 1: (11, 1)}
    return ScheduledBatch(
        step_id=0,
        chunks=tuple(
            Chunk(str(slot), slot, start, new, tuple(range(10 * slot, 10 * slot + 4)))
            for slot, (start, new) in sizes.items()
        ),
        admissions=tuple(
            Admission(
                str(slot),
                slot,
                tuple(range(100 * slot, 100 * slot + start + new)),
                start + new,
                SamplingParams(),
                seed=0,
            )
            for slot, (start, new) in sizes.items()
        ),
    )


def graphs_over(state: DeviceState, config: EngineConfig = CONFIG) -> ChunkGraphs:
    hidden = torch.zeros(config.max_num_seqs + 1, config.model_config.hidden_size)
    model = SimpleNamespace(group=SINGLE)
    return ChunkGraphs(config, model, [], state, hidden, None)  # type: ignore[arg-type]


def inputs(
    state: DeviceState, graphs: ChunkGraphs, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the step of that shape that was written last: ids, positions, contexts, KV slots, and
    where its rows end."""
    slots, starts, cu_seqlens_q = graphs._views(shape[0])
    tables = state.token_table, state.block_table
    *found, _ = reference.chunk_inputs(
        slots, starts, cu_seqlens_q, shape[1], *tables, state.block_size, 1
    )
    return (*found, cu_seqlens_q)


def test_real_tokens_come_first_and_the_rest_is_nobodys() -> None:
    batch = step()
    state, layout = state_with(batch), StepLayout.of(batch)
    graphs = graphs_over(state)
    shape = graphs._shape_for(layout.num_rows + 1, layout.num_tokens)
    assert shape == (8, 16)
    graphs._write_inputs(shape, layout)
    token_ids, positions, seqlens_k, slot_mapping, cu_seqlens_q = inputs(state, graphs, shape)
    expected = state.lay_out(layout)
    count = layout.num_tokens
    assert token_ids[:count].tolist() == expected.token_ids.tolist()
    assert positions[:count].tolist() == expected.positions.tolist()
    assert slot_mapping[:count].tolist() == expected.meta.slot_mapping.tolist()
    assert cu_seqlens_q[:4].tolist() == expected.meta.cu_seqlens_q.tolist()
    assert cu_seqlens_q[4:].tolist() == [16] * 5
    assert set((slot_mapping[count:] // CONFIG.block_size).tolist()) == {99}
    assert seqlens_k[:4].tolist() == [7, 13, 12, 16 - count]


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "shape"),
    [
        (2, 1, (2, 16)),
        (3, 16, (8, 16)),
        (8, 16, (8, 16)),
        (9, 16, (21, 16)),
        (2, 17, (2, 32)),
        (2, 96, (2, 96)),
        (3, 97, (8, 100)),
        (2, 101, None),
        (22, 30, None),
    ],
)
def test_the_smallest_graph_that_holds_a_step(
    num_rows: int, num_tokens: int, shape: tuple[int, int] | None
) -> None:
    graphs = graphs_over(DeviceState(CONFIG, CPU))
    assert graphs._shape_for(num_rows, num_tokens) == shape


@pytest.mark.parametrize("max_model_len", [2, 4, 40, 64, 512])
def test_every_shape_is_one_that_steps_can_have(
    monkeypatch: pytest.MonkeyPatch, max_model_len: int
) -> None:
    """What a rehearsal reads stands within the tables: a GPU would not say so, but stop."""
    config = make_config(max_num_seqs=20, max_model_len=max_model_len, max_num_batched_tokens=600)
    state = DeviceState(config, CPU)
    state.set_null_block(99)
    graphs = graphs_over(state, config)
    read = []

    def step(shape: tuple[int, int]) -> None:
        num_rows, num_tokens = shape
        assert graphs._views(num_rows)[0].tolist() == [state.null_slot] * num_rows
        _, positions, _, _, cu_seqlens_q = inputs(state, graphs, shape)
        assert cu_seqlens_q[-1] == num_tokens
        read.append(int(positions.max()))

    monkeypatch.setattr(graphs, "_step", step)
    for shape in graphs.shapes:
        graphs._rehearse(shape)
    assert len(read) == len(graphs.shapes)
    assert all(position < max_model_len for position in read)
    for num_rows, num_tokens in graphs.shapes:
        assert num_tokens <= num_rows * (max_model_len - 1)


@pytest.mark.parametrize("limits", [{"max_model_len": 2}, {"max_num_batched_tokens": 1}], ids=str)
def test_limits_of_a_few_tokens_leave_no_graphs(limits: dict[str, int]) -> None:
    config = make_config(max_num_seqs=1, **limits)
    state = DeviceState(config, CPU)
    graphs = graphs_over(state, config)
    graphs.capture()
    batch = ScheduledBatch(0, (Chunk("a", 0, 0, 1),))
    assert graphs.run(StepLayout.of(batch)) is None


def test_steps_that_keep_the_device_busy_have_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a step takes a millisecond a token, and its launches 300."""
    config = make_config(max_num_seqs=20, max_num_batched_tokens=8192)
    graphs = graphs_over(DeviceState(config, CPU), config)
    before = list(graphs.shapes)

    def seconds(work: Any) -> float:
        return max(0.3, 0.001 * work.args[0][1])

    monkeypatch.setattr(chunk_graphs, "_seconds", seconds)
    graphs._drop_device_bound()
    assert graphs._launch_seconds == 0.3
    assert graphs.shapes == [shape for shape in before if shape[1] <= 768]
    assert graphs._shape_for(2, 1000) is None


def test_padding_must_cost_less_than_launches() -> None:
    """Launching takes 30 ms here, and a replay 10 ms for 32 tokens, 40 ms for 96."""
    graphs = graphs_over(DeviceState(CONFIG, CPU))
    graphs._launch_seconds = 0.03
    graphs._replay_seconds = {(8, 32): 0.01, (8, 96): 0.04}
    assert graphs._pays((8, 32), 17), "the host would take longer"
    assert not graphs._pays((8, 96), 65), "27 ms of work, but 40 with its padding"
    assert graphs._pays((8, 96), 96), "there is no padding"


def test_a_layout_knows_a_plain_decode() -> None:
    def layout(*chunks: Chunk) -> StepLayout:
        return StepLayout.of(ScheduledBatch(0, chunks))

    assert layout(Chunk("a", 0, 4, 1), Chunk("b", 1, 9, 1)).is_decode
    assert not layout(Chunk("a", 0, 4, 1), Chunk("b", 1, 9, 2)).is_decode
    assert not layout(Chunk("a", 0, 4, 1, samples=False)).is_decode
