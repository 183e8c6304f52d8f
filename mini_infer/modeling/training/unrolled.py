"""A draft head over whole texts at once, several drafts deep, with gradients.

In inference the first draft starts from the token at position p, whose predecessors are verified
and have the target's keys and values. The drafts behind it see those too, and the head's own keys
of the tokens from p on. Over all starts of a text at once that is causal attention over the
target's keys, whatever the depth, and beside it one key of the head's for each draft so far
(EAGLE-3's "training-time test", arXiv 2503.01840, has the same two parts).

Letters in shapes: B texts, L tokens, S starts of each text, H query heads, D head size, n layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.kernels.reference import apply_rotary
from mini_infer.modeling.attention import GroupedQueryAttention
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.decoder_layer import DecoderLayer
from mini_infer.modeling.layers import GatedMLP, Linear, RMSNorm
from mini_infer.modeling.proposers.head import DraftHead, LaterDrafts
from mini_infer.modeling.training.target_pass import TargetTexts

KeysValues = tuple[Tensor, Tensor]
"""Each ``[B, H, S, D]``: repeated, so that every query head has its own."""


def unroll(model: CausalLM, head: DraftHead, texts: TargetTexts, depth: int) -> list[Tensor]:
    """The head's residual streams of ``depth`` drafts from every start.

    Entry j is ``[B, L - 1 - j, hidden]``, of the starts p = 1 .. L - 1 - j: what predicts the token
    at p + j + 1 from the target's state before p and the true tokens p .. p + j, or of a parallel
    head from the tokens p and p + j alone. Arithmetic is in the dtype of ``texts``.

    Raises:
        UnsupportedModelError: the architecture's layers are of a kind that this does not know.
    """
    layers = [_known(layer) for layer in head.layers]
    length = texts.token_ids.shape[1]
    group = model.config.num_heads // model.config.num_kv_heads
    context = [
        (_per_query_head(keys, group), _per_query_head(values, group))
        for keys, values in zip(texts.keys, texts.values, strict=True)
    ]
    own: list[list[KeysValues]] = [[] for _ in layers]
    embedded = model.embed_tokens(texts.token_ids.flatten()).view_as(texts.hidden)
    state, states = texts.hidden[:, :-1], []
    for ahead in range(min(depth, length - 1)):
        num_starts = length - 1 - ahead
        positions = torch.arange(1 + ahead, length, device=state.device)
        cos_sin = model.rotary(positions).cos_sin(state.dtype)
        if ahead and head.later is not None:
            x = head.later.start.to(state.dtype).expand(len(state), num_starts, -1)
        else:
            x = _linear(_norm(embedded[:, 1 + ahead :], head.token_norm), head.token_proj)
            x = x + _linear(_norm(state[:, :num_starts], head.hidden_norm), head.hidden_proj)
        for layer, keys_values, news in zip(layers, context, own, strict=True):
            x = _block(layer, x, cos_sin, keys_values, news)
        if ahead and head.later is not None:
            x = _corrected(head.later, x, embedded[:, 1 + ahead :])
        state = x
        states.append(state)
    return states


def head_logits(head: DraftHead, x: Tensor) -> Tensor:
    """``x [..., hidden] -> [..., Vd]``, as ``DraftHead.compute_logits``."""
    return _linear(_norm(x, head.norm), head.lm_head)


def _known(layer: torch.nn.Module) -> DecoderLayer:
    if isinstance(layer, DecoderLayer):
        return layer
    raise UnsupportedModelError(
        f"a draft head of {type(layer).__name__} can't be trained: speculate with ngram, "
        "early_exit or draft_model"
    )


def _block(
    layer: DecoderLayer,
    x: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    context: KeysValues,
    own: list[KeysValues],
) -> Tensor:
    """``DecoderLayer.forward`` for ``x [B, S, hidden]`` and ``cos, sin [S, 1, D]``.

    The start at place i sees the first i + 1 keys of ``context [B, H, L, D]``, its own in ``own``
    (one for each draft before, each of at least S starts), and the new one, which is appended.
    """
    attention = layer.self_attn
    normed = _norm(x, layer.input_layernorm)
    q, k, v = _heads(attention, normed, cos_sin)
    own.append((k, v))
    out = _attend(q, context, own, attention)
    x = x + _linear(out.transpose(1, 2).flatten(2), attention.o_proj)
    return _feed_forward(x, layer.post_attention_layernorm, layer.mlp)


def _corrected(later: LaterDrafts, x: Tensor, embedded: Tensor) -> Tensor:
    """``LaterDrafts.forward`` for ``x, embedded [B, S, hidden]``."""
    x = x + _linear(_norm(embedded, later.token_norm), later.token_proj)
    return _feed_forward(x, later.norm, later.mlp)


def _feed_forward(x: Tensor, norm: RMSNorm, mlp: GatedMLP) -> Tensor:
    gate, up = _linear(_norm(x, norm), mlp.gate_up_proj).chunk(2, dim=-1)
    return x + _linear(silu(gate) * up, mlp.down_proj)


def _heads(
    attention: GroupedQueryAttention, x: Tensor, cos_sin: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B, H, S, D]`` of ``x [B, S, hidden]``."""
    head_dim = attention.attention.head_dim
    parts = torch.split(
        _linear(x, attention.qkv_proj), list(attention.qkv_proj.out_features), dim=-1
    )
    q, k, v = (part.view(*x.shape[:2], -1, head_dim) for part in parts)
    if attention.head_norm:
        q, k = _norm(q, attention.q_norm), _norm(k, attention.k_norm)
    q, k = apply_rotary(q, *cos_sin), apply_rotary(k, *cos_sin)
    group = q.shape[2] // k.shape[2]
    return q.transpose(1, 2), _per_query_head(k, group), _per_query_head(v, group)


def _attend(
    q: Tensor, context: KeysValues, own: Sequence[KeysValues], attention: GroupedQueryAttention
) -> Tensor:
    """One softmax over the scores of context and own keys.

    Own keys stand behind the context's as if they were further tokens, of which a start sees those
    at its own place: more arithmetic than there is to do, and no scores in memory.
    """
    num_starts, ahead = q.shape[2], len(own) - 1
    window = attention.attention.sliding_window
    place = torch.arange(num_starts, device=q.device)
    back = place[:, None] - place
    seen, itself = back >= 0, back == 0
    if window is not None:  # a query at p + ahead, with p = place + 1
        seen = seen & (back + ahead + 1 < window)
    parts = [context, *own]
    masks = [seen]
    for step in range(len(own)):
        inside = window is None or ahead - step < window
        masks.append(itself if inside else torch.zeros_like(itself))
    keys, values = (
        torch.cat([planes[side][:, :, :num_starts] for planes in parts], dim=2) for side in (0, 1)
    )
    return scaled_dot_product_attention(
        q, keys, values, attn_mask=torch.cat(masks, dim=1), scale=attention.attention.scale
    )


def _per_query_head(plane: Tensor, group: int) -> Tensor:
    """``[B, S, Hkv, D] -> [B, H, S, D]``."""
    return plane.transpose(1, 2).repeat_interleave(group, dim=1)


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    return rms_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.eps)


def _linear(x: Tensor, product: Linear) -> Tensor:
    bias = product.bias
    return linear(x, product.weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))
