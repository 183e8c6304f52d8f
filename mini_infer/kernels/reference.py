"""The slow, obvious version of every operation: the oracle of the fast ones' tests."""

from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata, Rope

Norm = tuple[Tensor, float]
"""Weight ``[size]`` and epsilon of a root-mean-square norm."""
QKNorm = tuple[Tensor, Tensor, float]
"""Weights ``[D]`` of the norms of query and key heads (arXiv 2302.05442), and their epsilon."""


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of ``table [V, hidden]``: ``token_ids [T] -> [T, hidden]``."""
    return torch.nn.functional.embedding(token_ids, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467), in float32."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * weight


def sum_of_parts(
    parts: Tensor, residual: Tensor | None = None, norm: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """Adds up what each of N ranks has, ``parts [N, T, size]``: in float32, and rounded once.

    ``residual [T, size]``, where given, is added to, in place. Returns the sum and its norm.
    """
    total = parts.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32))
    total = total.to(parts.dtype) if residual is None else residual.copy_(residual + total)
    return total, None if norm is None else rms_norm(total, *norm)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
) -> Tensor:
    """``norm(x [T, K]) @ weight [N, K].T + bias [N] -> [T, N]``."""
    return torch.nn.functional.linear(x if norm is None else rms_norm(x, *norm), weight, bias)


def add_linear_(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Adds ``linear(x)`` to ``residual [T, N]`` in place, and returns it."""
    return residual.add_(linear(x, weight, bias))


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
) -> Tensor:
    """SwiGLU's first half: ``weight [2I, K]`` holds the gate's rows, then up's; ``-> [T, I]``."""
    return silu_and_mul(linear(x, weight, bias, norm))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's gate: ``gate_up [T, 2I] -> silu(gate) * up [T, I]`` (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates half-split pairs (arXiv 2104.09864): ``x [T, H, D]``, ``cos, sin [T, 1, D]``.

    The first half of ``sin`` comes negated.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((x2, x1), dim=-1) * sin


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores ``k, v [T, Hkv, D]`` at flat slots of ``[num_blocks, block_size, Hkv, D]`` caches."""
    block, offset = slot_mapping // k_cache.shape[1], slot_mapping % k_cache.shape[1]
    k_cache[block, offset] = k.to(k_cache.dtype)
    v_cache[block, offset] = v.to(v_cache.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal grouped-query attention over a paged cache, one row at a time (arXiv 2309.06180).

    ``q [T, H, D]`` -> ``[T, H, D]``. A query at position p sees keys (p - window, p].
    """
    out = torch.empty_like(q)
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    starts = meta.cu_seqlens_q.tolist()
    for row, context in enumerate(meta.seqlens_k.tolist()):
        begin, end = starts[row], starts[row + 1]
        blocks = meta.block_table[row, : -(-context // block_size)].long()
        k = k_cache[blocks].flatten(0, 1)[:context].repeat_interleave(group, dim=1).float()
        v = v_cache[blocks].flatten(0, 1)[:context].repeat_interleave(group, dim=1).float()
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float() * scale, k)
        query = torch.arange(context - (end - begin), context, device=q.device)[:, None]
        key = torch.arange(context, device=q.device)[None, :]
        visible = key <= query
        if sliding_window is not None:
            visible &= key > query - sliding_window
        scores = scores.masked_fill(~visible, float("-inf"))
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out


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
    """Rotates a step's queries and keys, stores keys and values, attends.

    ``qkv [T, H + 2 Hkv, D]`` is the packed projection: query heads, key heads, value heads.
    Returns ``[T, H * D]``.
    """
    num_kv_heads = k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if qk_norm is not None:
        q_weight, k_weight, eps = qk_norm
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    cos, sin = rope.cos_sin(qkv.dtype)
    q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    write_kv(k, v, k_cache, v_cache, meta.slot_mapping)
    return paged_attention(q, k_cache, v_cache, meta, scale, sliding_window).flatten(1)


def decode_inputs(
    slots: Tensor,
    starts: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a step of one token a row reads from the device's tables.

    ``slots, starts [R]`` int64: whose token, at which position. Returns token ids ``[R]``, context
    lengths ``[R]``, flat KV slots ``[R]`` (int64) and block table ``[R, num_columns]`` (int32), of
    which only the columns in use count.
    """
    blocks = block_table[slots, starts // block_size]
    slot_mapping = blocks * block_size + starts % block_size
    return token_table[slots, starts], starts + 1, slot_mapping, block_table[slots, :num_columns]


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
    """What a step of T tokens in R chunks of any lengths reads from the device's tables.

    ``slots, starts [R]`` and ``cu_seqlens_q [R + 1]``, all int64: whose chunk, from which position,
    and which of the step's tokens; a chunk may have none. Returns token ids and positions ``[T]``,
    context lengths ``[R]``, flat KV slots ``[T]`` (int64) and block table ``[R, num_columns]``
    (int32), of which only the columns in use count. Never waits for the device.
    """
    lens = cu_seqlens_q.diff()
    token_slots = slots.repeat_interleave(lens, output_size=num_tokens)
    offsets = starts - cu_seqlens_q[:-1]
    positions = torch.arange(num_tokens, device=slots.device)
    positions += offsets.repeat_interleave(lens, output_size=num_tokens)
    blocks = block_table[token_slots, positions // block_size]
    slot_mapping = blocks * block_size + positions % block_size
    token_ids = token_table[token_slots, positions]
    return token_ids, positions, starts + lens, slot_mapping, block_table[slots, :num_columns]


def publish_(
    token_ids: Tensor,
    slots: Tensor,
    starts: Tensor,
    null_slot: int,
    results: Tensor,
    turn: Tensor,
) -> None:
    """What a decode step of ``token_ids, slots, starts [R]`` leaves behind, all in int64.

    The tokens stand in row ``turn [1]`` of ``results [N, max R]``; the next turn is the next row's.
    ``starts`` are one more then, but those of the null slot: the next step's, if it has the same
    rows.
    """
    results[int(turn), : len(token_ids)] = token_ids
    starts += slots != null_slot
    turn.copy_((turn + 1) % len(results))


def accept_drafts_(
    token_ids: Tensor,
    first_samples: Tensor,
    num_drafts: Tensor,
    slots: Tensor,
    starts: Tensor,
    token_table: Tensor,
    last_positions: Tensor,
) -> Tensor:
    """Accepts the drafts that the model itself samples (arXiv 2408.07978), in place in the tables.

    Args:
        token_ids: ``[S]`` int64: row r sampled ``token_ids[first_samples[r] + j]`` for the place
            ``starts[r] + j`` of its request, ``j`` in ``0..num_drafts[r]``.
        first_samples, num_drafts, slots, starts: ``[R]`` int64.
        token_table: ``[slots, length]`` integers. A row's drafts stand there from ``starts[r]`` on;
            the first sample that is no draft is written, at its place.
        last_positions: ``[slots]`` int64; gets the place of that sample.

    Returns:
        ``[R]`` int64: how many drafts equal the samples, up to the first that does not.
    """
    most = int(num_drafts.max()) if len(num_drafts) else 0
    offsets = torch.arange(most + 1, device=slots.device)
    is_draft = offsets < num_drafts[:, None]
    # Beyond a row's samples the last one is repeated: it is no draft's.
    samples = token_ids[first_samples[:, None] + torch.minimum(offsets, num_drafts[:, None])]
    drafts = token_table[
        slots[:, None], starts[:, None] + torch.minimum(offsets, num_drafts[:, None])
    ]
    same = is_draft & (drafts == samples)
    num_accepted = same.long().cumprod(1).sum(1)
    places = starts + num_accepted
    token_table[slots, places] = samples.gather(1, num_accepted[:, None])[:, 0].to(
        token_table.dtype
    )
    last_positions[slots] = places
    return num_accepted


class VerifyInputs(NamedTuple):
    """A step of R requests with W tokens each: the last one that is known, and drafts behind it.

    All int64 but the block table.
    """

    token_ids: Tensor
    """``[R * W]``"""
    positions: Tensor
    """``[R * W]``"""
    sampled_positions: Tensor
    """``[R * W]``: where the token behind each one stands, or will."""
    token_slots: Tensor
    """``[R * W]``: whose token it is."""
    slot_mapping: Tensor
    """``[R * W]``: its flat KV slot."""
    starts: Tensor
    """``[R]``: positions of each row's first token."""
    seqlens_k: Tensor
    """``[R]``: context lengths, drafts included."""
    block_table: Tensor
    """``[R, num_columns]`` int32, of which only the columns in use count."""


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
    """What a step of ``width`` tokens a row reads from the device's tables.

    ``slots, starts [R]`` int64: whose tokens, and from which position on; where only the device
    knows, a start is -1, and the row begins at ``last_positions [slots]``. Tokens at or beyond
    ``kv_limits [slots]`` have no room in their request's blocks: they are surplus, and their keys
    go to ``null_block``. Never waits for the device.
    """
    starts = torch.where(starts < 0, last_positions[slots], starts)
    offsets = torch.arange(width, device=slots.device)
    positions = (starts[:, None] + offsets).flatten()
    token_slots = slots[:, None].expand(-1, width).flatten()
    columns = (positions // block_size).clamp(max=block_table.shape[1] - 1)
    has_room = positions < kv_limits[token_slots]
    blocks = block_table[token_slots, columns].long().where(has_room, null_block)
    return VerifyInputs(
        token_table[token_slots, positions].long(),
        positions,
        positions + 1,
        token_slots,
        blocks * block_size + positions % block_size,
        starts,
        starts + width,
        block_table[slots, :num_columns],
    )


def last_samples(
    first_samples: Tensor, num_accepted: Tensor, token_ids: Tensor, places: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What R rows sampled last: sample ``first_samples[r] + num_accepted[r]`` of S.

    ``token_ids, places [S]`` int64 and ``hidden [S, size]`` -> the same of those, ``[R]``, ``[R]``,
    ``[R, size]``.
    """
    last = first_samples + num_accepted
    return token_ids[last], places[last], hidden[last]


def write_drafts_(token_table: Tensor, slots: Tensor, positions: Tensor, drafts: Tensor) -> None:
    """Puts ``drafts [R, k]`` behind the ``positions [R]`` of the slots' last tokens."""
    places = positions[:, None] + torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    token_table.index_put_((slots[:, None], places), drafts.to(token_table.dtype))
