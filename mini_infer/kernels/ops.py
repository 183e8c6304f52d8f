"""The operations that a model calls. Each picks the implementation for the device of its arguments.

The torch reference is the oracle of every faster implementation, and what runs where there is none.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer.kernels import reference
from mini_infer.kernels.cpu_attention import grouped_attention
from mini_infer.kernels.cpu_norm import cpu_rms_norm
from mini_infer.kernels.metadata import AttentionMetadata


@functools.cache
def gpu_kernels() -> ModuleType | None:
    """``mini_infer.kernels.triton``, imported when a GPU first needs it; None without Triton."""
    try:
        from mini_infer.kernels import triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    if x.dtype == torch.float32 and x.is_cpu:
        return cpu_rms_norm(x, weight, eps)
    if x.is_cuda and (kernels := gpu_kernels()):
        result: Tensor = kernels.rms_norm(x, weight, eps)
        return result
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``."""
    if x.is_cuda and (kernels := gpu_kernels()):
        result: tuple[Tensor, Tensor] = kernels.add_rms_norm(x, residual, weight, eps)
        return result
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_and_mul``."""
    if gate_up.is_cuda and (kernels := gpu_kernels()):
        result: Tensor = kernels.silu_and_mul(gate_up)
        return result
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``reference.apply_rotary``."""
    if x.is_cpu:
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
    if x.is_cuda and (kernels := gpu_kernels()):
        result: Tensor = kernels.apply_rotary(x, cos, sin)
        return result
    return reference.apply_rotary(x, cos, sin)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``."""
    if k.is_cuda and (kernels := gpu_kernels()):
        kernels.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, v.to(v_cache.dtype))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """See ``reference.paged_attention``."""
    if q.is_cpu:
        groups = meta.row_groups(k_cache.shape[1])
        return grouped_attention(q, k_cache, v_cache, groups, scale, sliding_window)
    if meta.backend == "triton" and (kernels := gpu_kernels()):
        result: Tensor = kernels.paged_attention(q, k_cache, v_cache, meta, scale, sliding_window)
        return result
    return reference.paged_attention(q, k_cache, v_cache, meta, scale, sliding_window)
