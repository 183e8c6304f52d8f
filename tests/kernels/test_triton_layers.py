"""Norms, gate, rotary and cache writes in Triton against the reference in float64."""

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from mini_infer.kernels.metadata import Rope
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton")
activation = pytest.importorskip("mini_infer.kernels.triton.activation")
embedding = pytest.importorskip("mini_infer.kernels.triton.embedding")
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
@pytest.mark.parametrize("size", [96, 5000])
def test_embedding(size: int, dtype: torch.dtype) -> None:
    table, token_ids = random(7, size, dtype=dtype), torch.tensor([6, 0, 3, 3], device=DEVICE)
    out = embedding.embedding(token_ids, table)
    assert torch.equal(out, reference.embedding(token_ids, table))


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


def random_rope(num_tokens: int, head_dim: int) -> Rope:
    """Random angles at as many positions, in reverse."""
    angles = random(num_tokens + 2, head_dim // 2, seed=7)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    return Rope(table, torch.arange(num_tokens, 0, -1, device=DEVICE))


def caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pair = torch.full((3, 4, 2 * num_kv_heads, head_dim), 7.0, device=DEVICE, dtype=dtype)
    return pair[:, :, :num_kv_heads], pair[:, :, num_kv_heads:]


SLOTS = [9, 2, 11, 0, 5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 20), (2, 1, 2), (5, 1, 80)]
)
def test_rotary_and_write_kv(
    num_heads: int, num_kv_heads: int, head_dim: int, with_norm: bool, dtype: torch.dtype
) -> None:
    """Written slots hold rotated keys and values, all others what they held."""
    qkv = random(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    weights = random(head_dim, dtype=dtype, seed=3), random(head_dim, dtype=dtype, seed=4)
    cache, slots = caches(num_kv_heads, head_dim, dtype), torch.tensor(SLOTS, device=DEVICE)
    rope = random_rope(5, head_dim)
    qk_norm = (*weights, 1e-6) if with_norm else None
    out = rotary.rotary_and_write_kv(qkv, rope, *cache, slots, qk_norm)
    q, k, v = qkv.double().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if with_norm:
        q = reference.rms_norm(q, weights[0].double(), 1e-6)
        k = reference.rms_norm(k, weights[1].double(), 1e-6)
    angles = rope.cos_sin(torch.float64)
    assert_near(out, reference.apply_rotary(q, *angles))
    k_slots, v_slots = (part.flatten(0, 1) for part in cache)
    assert_near(k_slots[slots], reference.apply_rotary(k, *angles))
    assert torch.equal(v_slots[slots].double(), v)
    untouched = [slot for slot in range(len(k_slots)) if slot not in SLOTS]
    assert (k_slots[untouched] == 7).all()
    assert (v_slots[untouched] == 7).all()


def test_rotary_and_write_kv_where_heads_lie_apart() -> None:
    qkv, slots = random(5, 6, 16), torch.tensor(SLOTS, device=DEVICE)
    plain, apart = caches(2, 16, torch.float32), caches(2, 16, torch.float32)
    apart = tuple(cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in apart)
    for cache in (plain, apart):
        rotary.rotary_and_write_kv(qkv, random_rope(5, 16), *cache, slots)
    assert torch.equal(plain[0], apart[0])
    assert torch.equal(plain[1], apart[1])


@pytest.mark.parametrize("cache_dtype", DTYPES[:2])  # the interpreter truncates to bfloat16
def test_the_cache_may_have_another_dtype(cache_dtype: torch.dtype) -> None:
    qkv, slots = random(5, 4, 16), torch.tensor(SLOTS, device=DEVICE)
    same, other = caches(1, 16, torch.float32), caches(1, 16, cache_dtype)
    for cache in (same, other):
        rotary.rotary_and_write_kv(qkv, random_rope(5, 16), *cache, slots)
    assert torch.equal(other[0], same[0].to(cache_dtype))
    assert torch.equal(other[1], same[1].to(cache_dtype))
