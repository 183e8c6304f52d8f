"""Rotary positions, QK norm and the write to the KV cache, in one kernel.

Separately, a layer would read and write its queries and keys up to four times between the
projection and the attention, in up to six launches. Steps of one query a row do the same inside
the attention itself (``flash_decoding``), with the functions of this file.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.metadata import Rope
from mini_infer.kernels.triton.launch import power_of_two, starts_early

HEADS_PER_PROGRAM = 16
MANY_TOKENS = 512
"""From here on programs of two warps are faster than of four: each thread loads more at once."""


@triton.jit
def swapped_dims(dims, head_dim: tl.constexpr):
    """The dimension that each one is rotated with: the other half's (arXiv 2104.09864)."""
    return tl.where(dims < head_dim // 2, dims + head_dim // 2, dims - head_dim // 2)


@triton.jit
def load_angles(table, position, dims, head_dim: tl.constexpr):
    """Cosines and sines of a position for ``dims``; those of the first half negated."""
    pair = dims % (head_dim // 2)
    row = table + position.to(tl.int64) * head_dim + pair
    cos = tl.load(row, mask=dims < head_dim, other=0.0)
    sin = tl.load(row + head_dim // 2, mask=dims < head_dim, other=0.0)
    return cos, tl.where(dims < head_dim // 2, -sin, sin)


@triton.jit
def rotate(x, swapped, cos, sin):
    """Half-split rotation in float32; ``swapped`` is x with its halves exchanged."""
    return (x.to(tl.float32) * cos + swapped.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def inverse_rms(x, axis: tl.constexpr, eps, head_dim: tl.constexpr):
    """What scales the heads that lie along an axis of ``x`` to a root-mean-square of one."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis) / head_dim + eps)


@triton.jit
def scale_head(x, scale, weight):
    """The norm's second half, rounded where torch rounds."""
    normed = (x.to(tl.float32) * scale).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rotary_and_write_kernel(
    qkv_ptr,
    rope_table,
    positions,
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
    padded_half: tl.constexpr,
    tile_heads: tl.constexpr,
    norms: tl.constexpr,
    early: tl.constexpr,
):
    """Grid: (T, cdiv(H + 2 Hkv, tile_heads)). Heads are queries, then keys, then values.

    A head's halves, which are rotated with each other, are two tiles, so each value is loaded once.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = head_dim // 2
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)[:, None]
    dim = tl.arange(0, padded_half)[None, :]
    is_dim = dim < half
    is_query = (head < num_heads) & is_dim
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads) & is_dim
    is_value = (head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads) & is_dim
    # What no kernel of this step writes is read before the wait for them.
    position = tl.load(positions + token)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    angles = rope_table + position.to(tl.int64) * head_dim + dim
    cos = tl.load(angles, mask=is_dim, other=0.0)
    sin = tl.load(angles + half, mask=is_dim, other=0.0)
    if norms:
        q_weight = tl.load(q_norm_ptr + dim, mask=is_dim, other=0.0)
        k_weight = tl.load(k_norm_ptr + dim, mask=is_dim, other=0.0)
        weight1 = tl.where(head < num_heads, q_weight, k_weight)
        q_weight = tl.load(q_norm_ptr + half + dim, mask=is_dim, other=0.0)
        k_weight = tl.load(k_norm_ptr + half + dim, mask=is_dim, other=0.0)
        weight2 = tl.where(head < num_heads, q_weight, k_weight)
    if early:
        tl.extra.cuda.gdc_wait()
    source = qkv_ptr + token * token_stride + head * head_dim + dim
    inside = is_query | is_key | is_value
    x1 = tl.load(source, mask=inside, other=0.0)
    x2 = tl.load(source + half, mask=inside, other=0.0)
    turned1, turned2 = x1, x2
    if norms:
        wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
        squares = tl.sum(wide1 * wide1 + wide2 * wide2, 1)
        scale = tl.rsqrt(squares / head_dim + eps)[:, None]
        turned1 = scale_head(x1, scale, weight1)
        turned2 = scale_head(x2, scale, weight2)
    first = rotate(turned1, turned2, cos, -sin)
    second = rotate(turned2, turned1, cos, sin)
    query = q_out_ptr + (token * num_heads + head) * head_dim + dim
    tl.store(query, first, mask=is_query)
    tl.store(query + half, second, mask=is_query)
    place = slot // block_size * cache_block_stride + slot % block_size * cache_token_stride + dim
    key = k_cache + place + (head - num_heads) * cache_head_stride
    tl.store(key, first.to(k_cache.dtype.element_ty), mask=is_key)
    tl.store(key + half, second.to(k_cache.dtype.element_ty), mask=is_key)
    value = v_cache + place + (head - num_heads - num_kv_heads) * cache_head_stride
    tl.store(value, x1.to(v_cache.dtype.element_ty), mask=is_value)
    tl.store(value + half, x2.to(v_cache.dtype.element_ty), mask=is_value)


def rotary_and_write_kv(
    qkv: Tensor,
    rope: Rope,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Rotates queries and keys, stores keys and values; returns the queries ``[T, H, D]``.

    ``qkv [T, H + 2 Hkv, D]`` is the packed projection, contiguous within a token; ``qk_norm`` the
    weights ``[D]`` of the query and key norm and their epsilon, for Qwen3. The two caches must be
    laid out alike. The same as ``rms_norm``, ``apply_rotary`` and ``write_kv`` in turn.
    """
    num_tokens, total_heads, head_dim = qkv.shape
    num_kv_heads = k_cache.shape[2]
    num_heads = total_heads - 2 * num_kv_heads
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, eps = qk_norm or (qkv, qkv, 0.0)
    tile_heads = min(HEADS_PER_PROGRAM, power_of_two(total_heads))
    early = starts_early(qkv.device)
    rotary_and_write_kernel[num_tokens, triton.cdiv(total_heads, tile_heads)](
        qkv,
        rope.table,
        rope.positions,
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
        padded_half=power_of_two(head_dim // 2),
        tile_heads=tile_heads,
        norms=qk_norm is not None,
        early=early,
        num_warps=2 if num_tokens >= MANY_TOKENS else 4,
        launch_pdl=early,
    )
    return q
