"""Norms, gate, rotary and cache writes in Triton against the reference in float64."""

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton")
activation = pytest.importorskip("mini_infer.kernels.triton.activation")
norm = pytest.importorskip("mini_infer.kernels.triton.norm")
rotary = pytest.importorskip("mini_infer.kernels.triton.rotary")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[out.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 96), (1, 64), (5, 3, 16), (2, 2500)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    out = norm.rms_norm(x, weight, 1e-5)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert_near(out, reference.rms_norm(x.double(), weight.double(), 1e-5))


def test_rms_norm_of_heads_inside_a_packed_projection() -> None:
    packed, weight = random(4, 6, 16), random(16, seed=1)
    view = packed[:, 1:4]
    expected = norm.rms_norm(view.contiguous(), weight, 1e-6)
    assert torch.equal(norm.rms_norm(view, weight, 1e-6), expected)


def test_rms_norm_of_zeros_is_zero() -> None:
    zeros = torch.zeros(2, 8, device=DEVICE)
    assert torch.equal(norm.rms_norm(zeros, random(8), 1e-5), zeros)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 1500])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    out = activation.silu_and_mul(gate_up)
    assert out.shape == (3, size)
    assert_near(out, reference.silu_and_mul(gate_up.double()))


def angles(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, 1, D]`` of random angles; the first half of the sines is negated."""
    turn = random(num_tokens, 1, head_dim // 2, seed=7)
    cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 16), (11, 80)])
def test_apply_rotary(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x = random(4, num_heads + 2, head_dim, dtype=dtype)[:, 1:-1]
    cos, sin = angles(4, head_dim, dtype)
    out = rotary.apply_rotary(x, cos, sin)
    assert_near(out, reference.apply_rotary(x.double(), cos.double(), sin.double()))


def caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pair = torch.full((3, 4, 2 * num_kv_heads, head_dim), 7.0, device=DEVICE, dtype=dtype)
    return pair[:, :, :num_kv_heads], pair[:, :, num_kv_heads:]


SLOTS = [9, 2, 11, 0, 5]


@pytest.mark.parametrize("cache_dtype", DTYPES[:2])  # the interpreter truncates to bfloat16
def test_write_kv(cache_dtype: torch.dtype) -> None:
    """Written slots hold the converted values, all others what they held."""
    k, v = random(5, 3, 20), random(5, 6, 20, seed=1)[:, ::2]
    fast, slow = caches(3, 20, cache_dtype), caches(3, 20, cache_dtype)
    slots = torch.tensor(SLOTS, device=DEVICE)
    rotary.write_kv(k, v, *fast, slots)
    for token, slot in enumerate(SLOTS):
        slow[0][slot // 4, slot % 4] = k[token].to(cache_dtype)
        slow[1][slot // 4, slot % 4] = v[token].to(cache_dtype)
    assert torch.equal(fast[0], slow[0])
    assert torch.equal(fast[1], slow[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 20)])
def test_fused_rotary_and_write_is_the_three_operations_in_a_row(
    num_heads: int, num_kv_heads: int, head_dim: int, with_norm: bool, dtype: torch.dtype
) -> None:
    qkv = random(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = angles(5, head_dim, dtype)
    weights = random(head_dim, dtype=dtype, seed=3), random(head_dim, dtype=dtype, seed=4)
    fast, slow = (caches(num_kv_heads, head_dim, dtype) for _ in range(2))
    slots = torch.tensor(SLOTS, device=DEVICE)
    qk_norm = (*weights, 1e-6) if with_norm else None
    out = rotary.rotary_and_write_kv(qkv, cos, sin, *fast, slots, qk_norm)
    if with_norm:
        q, k = norm.rms_norm(q, weights[0], 1e-6), norm.rms_norm(k, weights[1], 1e-6)
    rotary.write_kv(rotary.apply_rotary(k, cos, sin), v, *slow, slots)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out, rotary.apply_rotary(q, cos, sin), **close)
    torch.testing.assert_close(fast[0], slow[0], **close)
    assert torch.equal(fast[1], slow[1])
