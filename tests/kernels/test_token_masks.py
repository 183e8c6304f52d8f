"""Grammars' masks on logits: the reference against loops, and Triton's kernel against it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import sampling
from tests.kernels.triton_device import DEVICE

SHAPES = [(1, 1), (3, 31), (4, 32), (2, 33), (5, 200), (3, 4097)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def case(num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 10_000 + vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype)
    rows = torch.randperm(num_rows, generator=generator)[: (num_rows + 1) // 2]
    words = torch.randint(
        -(2**31), 2**31, (len(rows), (vocab_size + 31) // 32), generator=generator
    )
    return logits.to(DEVICE), rows.to(DEVICE), words.int().to(DEVICE)


def by_loops(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    expected = logits.clone()
    for row, words in zip(rows.tolist(), masks.tolist(), strict=True):
        for token_id in range(logits.shape[1]):
            if not words[token_id // 32] >> (token_id % 32) & 1:
                expected[row, token_id] = float("-inf")
    return expected


def check(mask_: Any, num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits, rows, masks = case(num_rows, vocab_size, dtype)
    expected = by_loops(logits, rows, masks)
    assert mask_(logits, rows, masks) is logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), SHAPES)
def test_the_reference(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    check(sampling.mask_, num_rows, vocab_size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), SHAPES)
def test_triton(
    num_rows: int, vocab_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mini_infer.kernels.triton import token_masks

    monkeypatch.setattr(token_masks, "TILE", 64)
    check(token_masks.mask_, num_rows, vocab_size, dtype)


def test_rows_of_a_larger_table() -> None:
    """Logits of a CUDA graph are the first rows of a buffer, whose rows may be wider."""
    pytest.importorskip("triton")
    from mini_infer.kernels.triton import token_masks

    logits, rows, masks = case(4, 100, torch.float32)
    wide = torch.zeros(6, 130, device=DEVICE)
    wide[:4, :100] = logits
    token_masks.mask_(wide[:4, :100], rows, masks)
    assert torch.equal(wide[:4, :100], by_loops(logits, rows, masks))
    assert not wide[:, 100:].any()
    assert not wide[4:].any()
