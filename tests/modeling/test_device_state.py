"""Tables hold what admissions and chunks bring, whether by few writes or by many."""

import pytest
import torch

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling.device_state import FEW_WRITES, DeviceState
from tests.runtime.fake_executor import make_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [1, FEW_WRITES, FEW_WRITES + 1, 2 * FEW_WRITES])
def test_tokens_and_blocks_of_a_step(count: int) -> None:
    config = make_config(max_num_seqs=2 * FEW_WRITES, max_model_len=64, block_size=4)
    state = DeviceState(config, CPU)
    slots = range(count - 1, -1, -1)
    prompts = {slot: tuple(range(100 * slot, 100 * slot + slot + 9)) for slot in slots}
    shared = {slot: (7, 8) if slot % 2 else () for slot in slots}
    taken = {slot: tuple(range(50 * slot, 50 * slot + 3)) for slot in slots}
    state.take_in(
        ScheduledBatch(
            0,
            tuple(Chunk(str(slot), slot, 0, 9, taken[slot]) for slot in slots),
            tuple(
                Admission(
                    str(slot),
                    slot,
                    prompts[slot],
                    len(prompts[slot]),
                    SamplingParams(),
                    0,
                    block_ids=shared[slot],
                )
                for slot in slots
            ),
        )
    )
    for slot in slots:
        tokens, blocks = prompts[slot], shared[slot] + taken[slot]
        assert state.token_table[slot, : len(tokens)].tolist() == list(tokens)
        assert state.block_table[slot, : len(blocks)].tolist() == list(blocks)
    assert state.token_table[count:].sum() == 0
    (first, *_) = slots
    state.take_in(ScheduledBatch(1, (Chunk(str(first), first, 9, 1, (33,)),)))
    assert state.block_table[first, len(shared[first]) + 3] == 33


def test_rows_that_are_full_go_on_in_the_next_one() -> None:
    """Values of neighbours are one write there."""
    config = make_config(max_num_seqs=3, max_model_len=8, block_size=4)
    state = DeviceState(config, CPU)
    prompts = [tuple(range(10 * slot, 10 * slot + 8)) for slot in range(3)]
    blocks = [(slot, slot + 3) for slot in range(3)]
    state.take_in(
        ScheduledBatch(
            0,
            tuple(Chunk(str(slot), slot, 0, 8) for slot in range(3)),
            tuple(
                Admission(
                    str(slot), slot, prompts[slot], 8, SamplingParams(), 0, block_ids=blocks[slot]
                )
                for slot in range(3)
            ),
        )
    )
    assert state.token_table[:3].tolist() == [list(prompt) for prompt in prompts]
    assert state.block_table[:3].tolist() == [[0, 3], [1, 4], [2, 5]]
