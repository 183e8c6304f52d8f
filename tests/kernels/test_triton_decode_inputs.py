"""The gather of a decode step's inputs against the reference."""

import pytest
import torch

from mini_infer.kernels import reference
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton")
kernels = pytest.importorskip("mini_infer.kernels.triton.decode_inputs")


@pytest.mark.parametrize("num_columns", [3, 8, 1500])
def test_rows_of_the_tables(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    block_size, num_slots = 4, 5
    token_table = torch.randint(0, 99, (num_slots, 40), generator=generator, dtype=torch.int32)
    block_table = torch.randint(0, 99, (num_slots, 1500), generator=generator, dtype=torch.int32)
    slots = torch.tensor([4, 0, 2, 2])
    starts = torch.tensor([0, 3, 4, 11])
    tensors = [tensor.to(DEVICE) for tensor in (slots, starts, token_table, block_table)]
    *found, blocks = kernels.decode_inputs(*tensors, block_size, num_columns)
    *expected, all_blocks = reference.decode_inputs(*tensors, block_size, num_columns)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs.long())
    assert blocks.shape == (4, num_columns)
    for row, start in enumerate(starts.tolist()):
        in_use = start // block_size + 1
        assert torch.equal(blocks[row, :in_use], all_blocks[row, :in_use])
