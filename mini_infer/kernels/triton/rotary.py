"""Rotary positions, the write to the KV cache, and both (with QK norm) in one kernel.

Separately, a layer reads and writes its queries and keys up to four times between the projection
and the attention, in up to six launches. At batch 1 each launch costs as much as its work.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_PER_PROGRAM = 8


@triton.jit
def rotate(x, swapped, cos, sin):
    """Half-split rotation (arXiv 2104.09864); ``swapped`` is x with its halves exchanged."""
    return x.to(tl.float32) * cos.to(tl.float32) + swapped.to(tl.float32) * sin.to(tl.float32)


@triton.jit
def rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_heads: tl.constexpr,
):
    """Grid: (T, cdiv(heads, tile_heads)). ``cos, sin [T, D]``."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    dim = tl.arange(0, padded_dim)
    other = tl.where(dim < head_dim // 2, dim + head_dim // 2, dim - head_dim // 2)
    is_dim = dim < head_dim
    inside = (head[:, None] < num_heads) & is_dim[None, :]
    source = x_ptr + token * x_token_stride + head[:, None] * x_head_stride
    cos = tl.load(cos_ptr + token * head_dim + dim, mask=is_dim, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * head_dim + dim, mask=is_dim, other=0.0)[None, :]
    x = tl.load(source + dim[None, :], mask=inside, other=0.0)
    swapped = tl.load(source + other[None, :], mask=inside, other=0.0)
    target = (token * num_heads + head[:, None]) * head_dim + dim[None, :]
    tl.store(out_ptr + target, rotate(x, swapped, cos, sin).to(x.dtype), mask=inside)


@triton.jit
def write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache,
    v_cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    token_stride,
    head_stride,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_dim: tl.constexpr,
):
    """Grid: (T,). Converts to the dtype of the cache."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    head = tl.arange(0, padded_heads)[:, None]
    dim = tl.arange(0, padded_dim)[None, :]
    inside = (head < num_heads) & (dim < head_dim)
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=inside)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=inside)
    target = slot // block_size * block_stride + slot % block_size * token_stride
    target += head * head_stride + dim
    tl.store(k_cache + target, k.to(k_cache.dtype.element_ty), mask=inside)
    tl.store(v_cache + target, v.to(v_cache.dtype.element_ty), mask=inside)


@triton.jit
def rotary_and_write_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_out_ptr,
    k_cache,
    v_cache,
    slot_mapping,
    token_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_heads: tl.constexpr,
    norms: tl.constexpr,
):
    """Grid: (T, cdiv(H + 2 Hkv, tile_heads)). Heads are queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)[:, None]
    dim = tl.arange(0, padded_dim)[None, :]
    other = tl.where(dim < head_dim // 2, dim + head_dim // 2, dim - head_dim // 2)
    is_dim = dim < head_dim
    is_query = (head < num_heads) & is_dim
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads) & is_dim
    is_value = (head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads) & is_dim
    inside = is_query | is_key | is_value
    source = qkv_ptr + token * token_stride + head * head_dim
    x = tl.load(source + dim, mask=inside, other=0.0)
    swapped = tl.load(source + other, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + token * head_dim + dim, mask=is_dim, other=0.0)
    sin = tl.load(sin_ptr + token * head_dim + dim, mask=is_dim, other=0.0)
    turned, turned_swapped = x, swapped
    if norms:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / head_dim + eps)[:, None]
        q_weight = tl.load(q_norm_ptr + dim, mask=is_dim, other=0.0)
        k_weight = tl.load(k_norm_ptr + dim, mask=is_dim, other=0.0)
        weight = tl.where(head < num_heads, q_weight, k_weight).to(tl.float32)
        q_weight = tl.load(q_norm_ptr + other, mask=is_dim, other=0.0)
        k_weight = tl.load(k_norm_ptr + other, mask=is_dim, other=0.0)
        swapped_weight = tl.where(head < num_heads, q_weight, k_weight).to(tl.float32)
        turned = ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)
        wide = swapped.to(tl.float32)
        turned_swapped = ((wide * scale).to(x.dtype).to(tl.float32) * swapped_weight).to(x.dtype)
    turned = rotate(turned, turned_swapped, cos, sin).to(x.dtype)
    tl.store(q_out_ptr + (token * num_heads + head) * head_dim + dim, turned, mask=is_query)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    place = slot // block_size * cache_block_stride + slot % block_size * cache_token_stride + dim
    key = place + (head - num_heads) * cache_head_stride
    tl.store(k_cache + key, turned.to(k_cache.dtype.element_ty), mask=is_key)
    value = place + (head - num_heads - num_kv_heads) * cache_head_stride
    tl.store(v_cache + value, x.to(v_cache.dtype.element_ty), mask=is_value)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``reference.apply_rotary``; the heads of x may be any strides apart."""
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile_heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    rotary_kernel[num_tokens, triton.cdiv(num_heads, tile_heads)](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        x.stride(0),
        x.stride(1),
        num_heads=num_heads,
        head_dim=head_dim,
        padded_dim=triton.next_power_of_2(head_dim),
        tile_heads=tile_heads,
        num_warps=4,
    )
    return out


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``; the two caches must have equal strides."""
    num_tokens, num_heads, head_dim = k.shape
    write_kv_kernel[num_tokens,](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        num_heads=num_heads,
        head_dim=head_dim,
        block_size=k_cache.shape[1],
        padded_heads=triton.next_power_of_2(num_heads),
        padded_dim=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def rotary_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Rotates queries and keys, stores keys and values; returns the queries ``[T, H, D]``.

    ``qkv [T, H + 2 Hkv, D]`` is the packed projection, contiguous within a token; ``cos, sin
    [T, 1, D]``; ``qk_norm`` the weights ``[D]`` of the query and key norm and their epsilon, for
    Qwen3.
    The same as ``rms_norm``, ``apply_rotary`` and ``write_kv`` one after the other.
    """
    num_tokens, total_heads, head_dim = qkv.shape
    num_kv_heads = k_cache.shape[2]
    num_heads = total_heads - 2 * num_kv_heads
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, eps = qk_norm or (qkv, qkv, 0.0)
    tile_heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(total_heads))
    rotary_and_write_kernel[num_tokens, triton.cdiv(total_heads, tile_heads)](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        q_norm,
        k_norm,
        q,
        k_cache,
        v_cache,
        slot_mapping,
        qkv.stride(0),
        *k_cache.stride()[:3],
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=k_cache.shape[1],
        padded_dim=triton.next_power_of_2(head_dim),
        tile_heads=tile_heads,
        norms=qk_norm is not None,
        num_warps=4,
    )
    return q
