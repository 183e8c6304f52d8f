"""The gather of a step's inputs against the reference."""

import pytest
import torch

from mini_infer.kernels import reference
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton")
kernels = pytest.importorskip("mini_infer.kernels.triton.decode_inputs")
chunk_kernels = pytest.importorskip("mini_infer.kernels.triton.chunk_inputs")


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


@pytest.mark.parametrize("num_columns", [3, 8, 1500])
@pytest.mark.parametrize(
    "lens",
    [[5], [1, 1], [0, 3, 0, 0, 2], [300, 1, 0, 700, 4], [1] * 40, [0] * 9 + [256, 0]],
    ids=str,
)
def test_chunks_of_any_lengths(lens: list[int], num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    block_size, num_slots, longest = 4, 50, 2000
    token_table = torch.randint(0, 99, (num_slots, longest), generator=generator)
    block_table = torch.randint(0, 99, (num_slots, 1500), generator=generator, dtype=torch.int32)
    slots = torch.randint(0, num_slots, (len(lens),), generator=generator)
    starts = torch.randint(0, longest - 700, (len(lens),), generator=generator)
    cu_seqlens_q = torch.tensor([0, *lens]).cumsum(0)
    rows = [tensor.to(DEVICE) for tensor in (slots, starts, cu_seqlens_q)]
    tables = [tensor.to(DEVICE) for tensor in (token_table.int(), block_table)]
    arguments = *rows, sum(lens), *tables, block_size, num_columns
    *found, blocks = chunk_kernels.chunk_inputs(*arguments)
    *expected, all_blocks = reference.chunk_inputs(*arguments)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs.long())
    assert blocks.shape == (len(lens), num_columns)
    for row, context in enumerate((starts + cu_seqlens_q.diff()).tolist()):
        in_use = -(-context // block_size)
        assert torch.equal(blocks[row, :in_use], all_blocks[row, :in_use])
