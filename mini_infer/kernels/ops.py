"""The operations that a model calls. Each picks the implementation for the device of its arguments.

The torch reference is the oracle of every faster implementation, and what runs where there is none.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer.kernels import flash_attention, reference
from mini_infer.kernels.cpu_attention import grouped_attention
from mini_infer.kernels.cpu_norm import cpu_rms_norm
from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.kernels.reference import Norm, QKNorm, VerifyInputs


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


def runs_kernels(tensor: Tensor) -> bool:
    """Do operations on ``tensor`` run as kernels of ``gpu_kernels``?"""
    return tensor.is_cuda and gpu_kernels() is not None


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """See ``reference.embedding``."""
    if table.is_cuda and (kernels := gpu_kernels()):
        result: Tensor = kernels.embedding(token_ids, table)
        return result
    return reference.embedding(token_ids, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    if x.dtype == torch.float32 and x.is_cpu:
        return cpu_rms_norm(x, weight, eps)
    if x.is_cuda and (kernels := gpu_kernels()):
        result: Tensor = kernels.rms_norm(x, weight, eps)
        return result
    return reference.rms_norm(x, weight, eps)


def sum_over_ranks(
    part: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    mailboxes: Tensor,
    turns: Tensor,
    rank: int,
) -> tuple[Tensor, Tensor | None]:
    """See ``reference.sum_of_parts``: this rank's ``part``, and through ``mailboxes`` the others'.

    There are mailboxes only where there are kernels.
    """
    kernels = gpu_kernels()
    assert kernels is not None
    arguments = part, residual, norm, mailboxes, turns, rank
    result: tuple[Tensor, Tensor | None] = kernels.sum_over_ranks(*arguments)
    return result


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_and_mul``."""
    if gate_up.is_cuda and (kernels := gpu_kernels()):
        result: Tensor = kernels.silu_and_mul(gate_up)
        return result
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.linear``: one kernel for few rows, else a norm and the library's product.

    ``out [T, N]`` is where to put it, without bias.
    """
    if (kernels := _skinny_kernels(x, weight)) is not None:
        result: Tensor = kernels.linear(x, weight, bias, norm, out)
        return result
    x = x if norm is None else rms_norm(x, *norm)
    if out is not None:
        return torch.mm(x, weight.t(), out=out)
    return functional.linear(x, weight, bias)


def add_linear_(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``reference.add_linear_``."""
    if (kernels := _skinny_kernels(x, weight)) is not None:
        result: Tensor = kernels.add_linear_(residual, x, weight, bias)
        return result
    if bias is None:
        return residual.addmm_(x, weight.t())  # the product adds as it stores
    return residual.add_(functional.linear(x, weight, bias))


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
) -> Tensor:
    """See ``reference.gated_linear``."""
    if (kernels := _skinny_kernels(x, weight)) is not None:
        result: Tensor = kernels.gated_linear(x, weight, bias, norm)
        return result
    return silu_and_mul(linear(x, weight, bias, norm))


def _skinny_kernels(x: Tensor, weight: Tensor) -> ModuleType | None:
    """The GPU's kernels, if they multiply so few rows faster than the library does."""
    if x.is_cuda and (kernels := gpu_kernels()) and kernels.is_skinny(len(x), weight):
        return kernels
    return None


def attend(
    qkv: Tensor,
    rope: Rope,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    qk_norm: QKNorm | None = None,
) -> Tensor:
    """See ``reference.attend``."""
    caches = k_cache, v_cache
    if qkv.is_cpu:
        return _attend_on_cpu(qkv, rope, *caches, meta, scale, sliding_window, qk_norm)
    kernels = gpu_kernels()
    if kernels is None:
        return reference.attend(qkv, rope, *caches, meta, scale, sliding_window, qk_norm)
    if meta.backend == "triton":
        whole = None
        if meta.max_query_len == 1:
            whole = kernels.decode_attention
        elif kernels.takes_drafts(meta, *_group_and_size(qkv, k_cache), qk_norm is not None):
            whole = kernels.draft_attention
        if whole is not None:
            result: Tensor = whole(qkv, rope, *caches, meta, scale, sliding_window, qk_norm)
            return result
    q = kernels.rotary_and_write_kv(qkv, rope, *caches, meta.slot_mapping, qk_norm)
    return paged_attention(q, *caches, meta, scale, sliding_window).flatten(1)


def _group_and_size(qkv: Tensor, k_cache: Tensor) -> tuple[int, int]:
    """Query heads that share a key head, and the size of a head."""
    return qkv.shape[1] // k_cache.shape[2] - 2, qkv.shape[2]


def _attend_on_cpu(
    qkv: Tensor,
    rope: Rope,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    qk_norm: QKNorm | None,
) -> Tensor:
    num_kv_heads = k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, v = torch.split(qkv, [num_heads + num_kv_heads, num_kv_heads], dim=1)
    if qk_norm is not None:
        q_weight, k_weight, eps = qk_norm
        q, k = torch.split(qk, [num_heads, num_kv_heads], dim=1)
        qk = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), dim=1)
    cos, sin = rope.cos_sin(qk.dtype)
    qk = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)  # queries and keys at once
    q, k = torch.split(qk, [num_heads, num_kv_heads], dim=1)
    write_kv(k, v, k_cache, v_cache, meta.slot_mapping)
    return paged_attention(q, k_cache, v_cache, meta, scale, sliding_window).flatten(1)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``."""
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
    if meta.backend == "flash_attn":
        return flash_attention.paged_attention(q, k_cache, v_cache, meta, scale, sliding_window)
    return reference.paged_attention(q, k_cache, v_cache, meta, scale, sliding_window)


def decode_inputs(
    slots: Tensor,
    starts: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.decode_inputs``."""
    arguments = slots, starts, token_table, block_table, block_size, num_columns
    if slots.is_cuda and (kernels := gpu_kernels()):
        result: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.decode_inputs(*arguments)
        return result
    return reference.decode_inputs(*arguments)


def chunk_inputs(
    slots: Tensor,
    starts: Tensor,
    cu_seqlens_q: Tensor,
    num_tokens: int,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.chunk_inputs``."""
    rows, tables = (slots, starts, cu_seqlens_q), (token_table, block_table)
    arguments = *rows, num_tokens, *tables, block_size, num_columns
    if slots.is_cuda and (kernels := gpu_kernels()):
        result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = kernels.chunk_inputs(*arguments)
        return result
    return reference.chunk_inputs(*arguments)


def publish_(
    token_ids: Tensor,
    slots: Tensor,
    starts: Tensor,
    null_slot: int,
    results: Tensor,
    turn: Tensor,
) -> None:
    """See ``reference.publish_``."""
    arguments = token_ids, slots, starts, null_slot, results, turn
    if slots.is_cuda and (kernels := gpu_kernels()):
        kernels.publish_(*arguments)
    else:
        reference.publish_(*arguments)


def verify_inputs(
    slots: Tensor,
    starts: Tensor,
    width: int,
    token_table: Tensor,
    block_table: Tensor,
    last_positions: Tensor,
    kv_limits: Tensor,
    block_size: int,
    num_columns: int,
    null_block: int,
) -> VerifyInputs:
    """See ``reference.verify_inputs``."""
    tables = token_table, block_table, last_positions, kv_limits
    arguments = slots, starts, width, *tables, block_size, num_columns, null_block
    if slots.is_cuda and (kernels := gpu_kernels()):
        result: VerifyInputs = kernels.verify_inputs(*arguments)
        return result
    return reference.verify_inputs(*arguments)


def accept_drafts_(
    token_ids: Tensor,
    first_samples: Tensor,
    num_drafts: Tensor,
    slots: Tensor,
    starts: Tensor,
    token_table: Tensor,
    last_positions: Tensor,
) -> Tensor:
    """See ``reference.accept_drafts_``."""
    rows = first_samples, num_drafts, slots, starts
    if slots.is_cuda and (kernels := gpu_kernels()):
        result: Tensor = kernels.accept_drafts_(token_ids, *rows, token_table, last_positions)
        return result
    return reference.accept_drafts_(token_ids, *rows, token_table, last_positions)


def last_samples(
    first_samples: Tensor, num_accepted: Tensor, token_ids: Tensor, places: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.last_samples``."""
    arguments = first_samples, num_accepted, token_ids, places, hidden
    if hidden.is_cuda and (kernels := gpu_kernels()):
        result: tuple[Tensor, Tensor, Tensor] = kernels.last_samples(*arguments)
        return result
    return reference.last_samples(*arguments)


def write_drafts_(token_table: Tensor, slots: Tensor, positions: Tensor, drafts: Tensor) -> None:
    """See ``reference.write_drafts_``."""
    if slots.is_cuda and (kernels := gpu_kernels()):
        kernels.write_drafts_(token_table, slots, positions, drafts)
    else:
        reference.write_drafts_(token_table, slots, positions, drafts)
