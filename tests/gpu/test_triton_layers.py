"""Norms, gate, rotary and cache writes on a GPU at the sizes of Qwen2.5-7B and Qwen3-0.6B."""

import math

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from mini_infer.kernels.metadata import Rope
from mini_infer.kernels.triton import activation, norm, rotary

DEVICE = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BY_DTYPE = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
BY_TOKENS = pytest.mark.parametrize("num_tokens", [1, 33, 2048])


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Drawn afresh in every run; the memory that is handed out next holds NaN."""
    values = torch.randn(*shape, device=DEVICE, dtype=dtype)
    torch.full((16 << 20,), math.nan, device=DEVICE)
    return values


def assert_near(out: Tensor, exact: Tensor) -> None:
    assert (out.double() - exact).norm() / exact.norm() < TOLERANCE[out.dtype]


@BY_DTYPE
@BY_TOKENS
@pytest.mark.parametrize("size", [1024, 3584])
def test_norms(size: int, num_tokens: int, dtype: torch.dtype) -> None:
    x, weight = random(num_tokens, size, dtype=dtype), random(size, dtype=dtype)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert_near(norm.rms_norm(x, weight, 1e-6), exact)


@BY_DTYPE
@BY_TOKENS
@pytest.mark.parametrize("size", [3072, 18944])
def test_silu_and_mul(size: int, num_tokens: int, dtype: torch.dtype) -> None:
    gate_up = random(num_tokens, 2 * size, dtype=dtype)
    assert_near(activation.silu_and_mul(gate_up), reference.silu_and_mul(gate_up.double()))


@BY_DTYPE
@BY_TOKENS
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (16, 8)])
def test_rotary_and_cache_writes(
    heads: int, kv_heads: int, num_tokens: int, dtype: torch.dtype
) -> None:
    qkv = random(num_tokens, heads + 2 * kv_heads, 128, dtype=dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    angles = random(4096, 64, dtype=torch.float32)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    rope = Rope(table, torch.randint(4096, (num_tokens,), device=DEVICE))
    weights = random(128, dtype=dtype), random(128, dtype=dtype)
    pair = torch.zeros(200, 16, 2 * kv_heads, 128, device=DEVICE, dtype=dtype)
    slots = torch.randperm(3200, device=DEVICE)[:num_tokens]
    caches = pair[:, :, :kv_heads], pair[:, :, kv_heads:]
    out = rotary.rotary_and_write_kv(qkv, rope, *caches, slots, (*weights, 1e-6))
    flat = pair.view(3200, 2 * kv_heads, 128)

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        normed = reference.rms_norm(x.double(), weight.double(), 1e-6)
        return reference.apply_rotary(normed, *rope.cos_sin(torch.float64))

    assert_near(out, turned(q, weights[0]))
    assert_near(flat[slots, :kv_heads], turned(k, weights[1]))
    assert torch.equal(flat[slots, kv_heads:], v)
    untouched = torch.ones(3200, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert not flat[untouched].any()
