"""Inputs of steps with drafts, and which drafts are accepted, against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_infer.core.speculative_config import MAX_DRAFTS
from mini_infer.kernels import reference
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton")
inputs_kernels = pytest.importorskip("mini_infer.kernels.triton.verify_inputs")
accept_kernels = pytest.importorskip("mini_infer.kernels.triton.accept_drafts")
draft_kernels = pytest.importorskip("mini_infer.kernels.triton.draft_rows")

NULL_SLOT, NULL_BLOCK = 6, 77
POISON = -7


def integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator)


def poison_free_memory() -> None:
    """New tensors get memory full of this: an element that nobody wrote shows."""
    held = [torch.full((size,), POISON, device=DEVICE) for size in (1, 4, 16, 64, 256, 1500)]
    del held


@pytest.mark.parametrize("num_columns", [3, 8, 1500])
@pytest.mark.parametrize("width", [1, 2, 5, 1 + MAX_DRAFTS])
def test_rows_with_drafts(width: int, num_columns: int) -> None:
    """Known starts and unknown ones, rows with room and without, and a surplus row."""
    generator = torch.Generator().manual_seed(width)
    block_size = 4
    token_table = integers(generator, 99, NULL_SLOT + 1, 60).int()
    block_table = integers(generator, 77, NULL_SLOT + 1, 1500).int()
    block_table[NULL_SLOT] = NULL_BLOCK
    last_positions = torch.tensor([9, 31, 8, 40, 5, 17, 0])
    kv_limits = torch.tensor([60, 32, 12, 8, 6, 20, 0])
    slots = torch.tensor([4, 0, 2, 1, NULL_SLOT])
    starts = torch.tensor([3, -1, -1, 30, 0])
    rows = [tensor.to(DEVICE) for tensor in (slots, starts)]
    tables = [t.to(DEVICE) for t in (token_table, block_table, last_positions, kv_limits)]
    arguments = *rows, width, *tables, block_size, num_columns, NULL_BLOCK
    poison_free_memory()
    found = inputs_kernels.verify_inputs(*arguments)
    expected = reference.verify_inputs(*arguments)
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        if name != "block_table":
            assert ours.dtype == torch.int64
            assert torch.equal(ours, theirs), name
    assert found.starts.tolist() == [3, 9, 8, 30, 0]
    assert found.block_table.shape == (5, num_columns)
    for row, context in enumerate(found.seqlens_k.tolist()):
        in_use = -(-context // block_size)
        assert torch.equal(found.block_table[row, :in_use], expected.block_table[row, :in_use])
    blocks = (found.slot_mapping // block_size).view(5, width)
    positions = found.positions.view(5, width)
    no_room = positions >= tables[3][rows[0]][:, None]
    assert torch.equal(no_room, (blocks == NULL_BLOCK))


drafts = st.integers(0, MAX_DRAFTS).flatmap(
    lambda count: st.tuples(st.just(count), st.integers(0, count), st.integers(0, 20))
)


@given(rows=st.lists(drafts, min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_drafts_up_to_the_first_that_differs(rows: list[tuple[int, int, int]], seed: int) -> None:
    """Of so many drafts, so many are right, from such a place on. Behind a wrong one others may be
    right again."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(NULL_SLOT, generator=generator)[: len(rows)]
    starts = torch.tensor([start for _, _, start in rows])
    num_drafts = torch.tensor([count for count, _, _ in rows])
    first_samples = (num_drafts + 1).cumsum(0) - num_drafts - 1
    token_ids = integers(generator, 2**17, sum(count + 1 for count, _, _ in rows))
    table = integers(generator, 2**17, NULL_SLOT + 1, 40).int()
    for slot, first, (count, right, start) in zip(slots, first_samples, rows, strict=True):
        table[slot, start : start + count] = token_ids[first : first + count].int()
        if right < count:
            table[slot, start + right] ^= 1
    last_positions = torch.full((NULL_SLOT + 1,), POISON)
    expected_table = table.clone()
    expected_last = last_positions.clone()
    for slot, first, (_, right, start) in zip(slots, first_samples, rows, strict=True):
        expected_table[slot, start + right] = token_ids[first + right].int()
        expected_last[slot] = start + right
    of_rows = token_ids, first_samples, num_drafts, slots, starts
    for accept_drafts_, device in (
        (reference.accept_drafts_, torch.device("cpu")),
        (accept_kernels.accept_drafts_, DEVICE),
    ):
        tables = table.clone().to(device), last_positions.clone().to(device)
        poison_free_memory()
        accepted = accept_drafts_(*(tensor.to(device) for tensor in of_rows), *tables)
        assert accepted.dtype == torch.int64
        assert accepted.tolist() == [right for _, right, _ in rows]
        assert torch.equal(tables[0].cpu(), expected_table)
        assert torch.equal(tables[1].cpu(), expected_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 1000, 3584])
def test_last_samples(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    token_ids, places = integers(generator, 2**17, 40), integers(generator, 2**31, 40)
    hidden = torch.randn(40, size, generator=generator).to(dtype)
    first, num_accepted = torch.tensor([0, 39, 5, 17]), torch.tensor([3, 0, 1, 16])
    arguments = [t.to(DEVICE) for t in (first, num_accepted, token_ids, places, hidden)]
    poison_free_memory()
    found = draft_kernels.last_samples(*arguments)
    for ours, theirs in zip(found, reference.last_samples(*arguments), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("num_drafts", [1, 5, MAX_DRAFTS])
def test_drafts_behind_the_last_token(num_drafts: int) -> None:
    """Also those that lie apart, as a proposer may have stacked them the other way."""
    generator = torch.Generator().manual_seed(num_drafts)
    table = integers(generator, 99, NULL_SLOT + 1, 40).int()
    slots, positions = torch.tensor([4, 0, 2]), torch.tensor([0, 23, 11])
    drafts = integers(generator, 2**17, num_drafts, 3).t()
    found, expected = table.clone().to(DEVICE), table.clone()
    rows = slots, positions, drafts
    draft_kernels.write_drafts_(found, *(tensor.to(DEVICE) for tensor in rows))
    reference.write_drafts_(expected, *rows)
    assert torch.equal(found.cpu(), expected)
    assert (found.cpu() != table).sum() <= 3 * num_drafts
