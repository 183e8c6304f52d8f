"""Packed products against a plain one, in the shapes of a decode step and of a prompt's chunk."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_infer.kernels.cpu_linear import (
    blocked_product,
    float16_product,
    has_blocked_products,
    has_float16_products,
)

Pack = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
OFFERED: list[Pack] = [
    pack
    for pack, offered in (
        (float16_product, has_float16_products()),
        (blocked_product, has_blocked_products()),
    )
    if offered
]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(pack: Pack, tokens: int, inputs: int, outputs: int, has_bias: bool, seed: int) -> None:
    """Weights that float16 holds exactly, so that both kinds must agree with float64."""
    x = numbers(tokens, inputs, seed=seed)
    weight = (numbers(outputs, inputs, seed=seed + 1) * inputs**-0.5).half().float()
    bias = numbers(outputs, seed=seed + 2).half().float() if has_bias else None
    before = x.clone()
    out = pack(weight, bias)(x)
    assert torch.equal(x, before)
    assert out.dtype == torch.float32
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pack", OFFERED)
@pytest.mark.parametrize("tokens", [1, 2, 8, 33, 128])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (64, 1), (1, 64), (3, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product(pack: Pack, tokens: int, inputs: int, outputs: int, has_bias: bool) -> None:
    check(pack, tokens, inputs, outputs, has_bias, seed=0)


@pytest.mark.parametrize("pack", OFFERED)
@given(
    tokens=st.integers(1, 40),
    inputs=st.integers(1, 80),
    outputs=st.integers(1, 80),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_product_of_any_shape(
    pack: Pack, tokens: int, inputs: int, outputs: int, has_bias: bool, seed: int
) -> None:
    check(pack, tokens, inputs, outputs, has_bias, seed)


@pytest.mark.parametrize("pack", OFFERED)
def test_a_row_computes_the_same_in_any_batch(pack: Pack) -> None:
    product = pack(numbers(48, 32, seed=1).half().float(), None)
    x = numbers(17, 32, seed=2)
    alone = torch.cat([product(row) for row in x.split(1)])
    torch.testing.assert_close(product(x), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pack", OFFERED)
def test_a_product_keeps_no_reference_to_the_weight(pack: Pack) -> None:
    weight = numbers(48, 32, seed=1).half().float()
    last = weakref.ref(weight)
    product = pack(weight, None)
    del weight
    gc.collect()
    assert last() is None
    assert product(torch.ones(1, 32)).shape == (1, 48)


@pytest.mark.parametrize("pack", OFFERED)
def test_a_weight_may_be_a_view(pack: Pack) -> None:
    """Rows of a larger matrix, and columns: what a loader may hand over."""
    whole = numbers(40, 64, seed=3).half().float()
    x = numbers(2, 32, seed=4)
    for view in (whole[8:24, :32], whole[:, ::2], whole.T[:32, :32]):
        expected = x @ view.T
        torch.testing.assert_close(pack(view, None)(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pack", OFFERED)
def test_one_huge_weight_does_not_become_nan(pack: Pack) -> None:
    """Beyond float16's range fbgemm saturates; infinity times zero would spoil a whole row."""
    out = pack(torch.tensor([[1e6, 0.0]]), None)(torch.tensor([[0.0, 1.0]]))
    assert torch.equal(out, torch.zeros(1, 1))
