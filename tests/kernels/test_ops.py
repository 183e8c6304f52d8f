"""Norm, rotary embedding and activation: the fast version against the reference and float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_infer.kernels import ops, reference
from mini_infer.kernels.metadata import AttentionMetadata, Rope

TOKENS = [1, 2, 7, 128]
SIZES = [2, 8, 576, 1536]


def numbers(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.1])
def test_rms_norm(tokens: int, size: int, eps: float) -> None:
    x, weight = numbers(tokens, size), numbers(size, seed=1)
    before = x.clone()
    out = ops.rms_norm(x, weight, eps)
    assert torch.equal(x, before), "its input is still needed"
    torch.testing.assert_close(out, reference.rms_norm(x, weight, eps), atol=1e-6, rtol=1e-5)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=1e-5)


@given(
    scale=st.floats(1e-6, 1e4),
    eps=st.sampled_from([1e-6, 1e-5, 1e-3]),
    size=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=50)
def test_rms_norm_of_any_magnitude(scale: float, eps: float, size: int, seed: int) -> None:
    """From activations far below ``eps`` to outliers like those of real models."""
    x, weight = numbers(3, size, seed=seed, spread=scale), numbers(size, seed=1)
    expected = reference.rms_norm(x, weight, eps)
    torch.testing.assert_close(ops.rms_norm(x, weight, eps), expected, atol=1e-6, rtol=2e-5)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


@pytest.mark.parametrize("leading", [(3, 5), (1, 9, 2)])
def test_rms_norm_of_heads(leading: tuple[int, ...]) -> None:
    """Qwen3 norms each head: any leading dimensions, and a view that is not contiguous."""
    x = numbers(*leading, 16)[..., ::2]
    weight = numbers(8, seed=1)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_in_half_precision_is_the_reference(dtype: torch.dtype) -> None:
    x, weight = numbers(4, 64).to(dtype), numbers(64, seed=1).to(dtype)
    out = ops.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert torch.equal(out, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", SIZES)
def test_silu_and_mul(tokens: int, size: int) -> None:
    gate_up = numbers(tokens, 2 * size, spread=8.0)
    expected = reference.silu_and_mul(gate_up.clone())
    out = ops.silu_and_mul(gate_up)
    assert out.shape == (tokens, size)
    assert torch.equal(out, expected)


def test_silu_and_mul_does_not_change_its_input() -> None:
    gate_up = numbers(3, 8)
    before = gate_up.clone()
    ops.silu_and_mul(gate_up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (9, 64), (3, 6)])
def test_apply_rotary(tokens: int, heads: int, head_dim: int) -> None:
    x = numbers(tokens, heads, head_dim)
    angles = numbers(tokens, 1, head_dim // 2, seed=1, spread=10.0)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    out = reference.apply_rotary(x, cos, sin)
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(
        torch.ones_like(angles).double(), angles.double()
    )
    exact = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


def test_apply_rotary_of_position_zero_changes_nothing() -> None:
    x = numbers(2, 3, 8)
    assert torch.equal(reference.apply_rotary(x, torch.ones(2, 1, 8), torch.zeros(2, 1, 8)), x)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_with_the_norm_before_and_the_sum_after(
    tokens: int, with_norm: bool, with_bias: bool
) -> None:
    x, weight, residual = numbers(tokens, 24), numbers(10, 24, seed=1), numbers(tokens, 10, seed=2)
    bias = numbers(10, seed=3) if with_bias else None
    norm = (numbers(24, seed=4), 1e-5) if with_norm else None
    close = {"atol": 1e-5, "rtol": 1e-5}
    plain = reference.linear(x, weight, bias, norm)
    torch.testing.assert_close(ops.linear(x, weight, bias, norm), plain, **close)
    gated = reference.silu_and_mul(plain)
    torch.testing.assert_close(ops.gated_linear(x, weight, bias, norm), gated, **close)
    expected = residual + reference.linear(x, weight, bias)
    total = ops.add_linear_(residual, x, weight, bias)
    assert total is residual
    torch.testing.assert_close(residual, expected, **close)


@pytest.mark.parametrize("with_norm", [False, True])
def test_attend_rotates_stores_and_attends(with_norm: bool) -> None:
    """One row of three tokens and one of a single token; the keys of both start empty."""
    num_heads, num_kv_heads, head_dim = 4, 2, 8
    qkv = numbers(4, num_heads + 2 * num_kv_heads, head_dim)
    angles = numbers(16, head_dim // 2, seed=1, spread=3.0)
    rope = Rope(torch.cat((angles.cos(), angles.sin()), -1), torch.tensor([0, 1, 2, 0]))
    meta = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 3, 4]),
        seqlens_k=torch.tensor([3, 1]),
        block_table=torch.tensor([[2, 0], [1, 0]], dtype=torch.int32),
        slot_mapping=torch.tensor([4, 5, 0, 2]),
        max_query_len=3,
        max_seqlen_k=3,
        query_lens=(3, 1),
        context_lens=(3, 1),
    )
    qk_norm = (numbers(head_dim, seed=2), numbers(head_dim, seed=3), 1e-6) if with_norm else None
    results = []
    for attend in (ops.attend, reference.attend):
        caches = (
            torch.zeros(4, 2, num_kv_heads, head_dim),
            torch.zeros(4, 2, num_kv_heads, head_dim),
        )
        results.append((attend(qkv.clone(), rope, *caches, meta, 0.3, None, qk_norm), *caches))
    assert results[0][0].shape == (4, num_heads * head_dim)
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
