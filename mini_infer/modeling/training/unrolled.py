"""A draft head over whole texts at once, several drafts deep, with gradients.

In inference the first draft starts from the verified token at position p, whose predecessors have
keys and values, and the later ones from the drafts before them over that same context. So training
needs no mask of its own for later drafts (EAGLE-3's "training-time test", arXiv 2503.01840, does):
whatever the depth, a start at p sees the keys before p, which is plain causal attention.

Letters in shapes: B texts, n starts of each, S = B * n, H query heads, D head size.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from mini_infer.kernels.reference import apply_rotary, rms_norm
from mini_infer.modeling.layers import Embedding, Linear, RMSNorm
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.rotary import RotaryEmbedding
from mini_infer.modeling.training.target_pass import TargetTexts


def unroll(
    head: DraftHead, texts: TargetTexts, embedding: Embedding, rotary: RotaryEmbedding, depth: int
) -> list[Tensor]:
    """The head's residual streams of ``depth`` drafts from every start.

    Entry j is ``[B, L - 1 - j, hidden]``, of the starts p = 1 .. L - 1 - j: what predicts the token
    at p + j + 1 from the target's state before p and the true tokens p .. p + j. Arithmetic is in
    the dtype of ``texts``.
    """
    length = texts.token_ids.shape[1]
    embedded = embedding(texts.token_ids)  # [B, L, hidden]
    state, states = texts.hidden[:, :-1], []
    keys, values = (plane[:, :-1].transpose(1, 2) for plane in (texts.keys, texts.values))
    for ahead in range(depth):
        starts = length - 1 - ahead
        if starts < 1:
            break
        positions = torch.arange(1 + ahead, length, device=state.device)
        cos, sin = rotary(positions).cos_sin(state.dtype)
        state = _block(
            head,
            state[:, :starts],
            embedded[:, 1 + ahead :],
            cos,
            sin,
            keys[:, :, :starts],
            values[:, :, :starts],
        )
        states.append(state)
    return states


def head_logits(head: DraftHead, x: Tensor) -> Tensor:
    """``x [..., hidden] -> [..., Vd]``, as ``DraftHead.compute_logits``."""
    return _linear(_norm(x, head.norm), head.lm_head)


def _block(
    head: DraftHead, state: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """``DraftHead.forward`` for ``state, embedded [B, n, hidden]``, ``cos, sin [n, 1, D]`` and
    ``k, v [B, Hkv, n, D]``: the start at place i sees the first i + 1 keys."""
    x = _linear(_norm(embedded, head.token_norm), head.token_proj)
    x = x + _linear(_norm(state, head.hidden_norm), head.hidden_proj)
    q = _linear(_norm(x, head.input_layernorm), head.q_proj)
    q = q.view(*q.shape[:2], -1, head.head_dim)
    if head.q_norm is not None:
        q = _norm(q, head.q_norm)
    q = apply_rotary(q, cos, sin).transpose(1, 2)  # [B, H, n, D]
    window = head.sliding_window
    num_starts = q.shape[2]
    if window is None or window >= num_starts:
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=head.scale, enable_gqa=True
        )
    else:
        place = torch.arange(num_starts, device=q.device)
        back = place[:, None] - place
        mask = (back >= 0) & (back < window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=head.scale, enable_gqa=True
        )
    x = x + _linear(out.transpose(1, 2).flatten(2), head.o_proj)
    normed = _norm(x, head.post_attention_layernorm)
    gate, up = _linear(normed, head.mlp.gate_up_proj).chunk(2, dim=-1)
    return x + _linear(silu(gate) * up, head.mlp.down_proj)


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    return rms_norm(x, norm.weight.to(x.dtype), norm.eps)


def _linear(x: Tensor, product: Linear) -> Tensor:
    bias = product.bias
    return linear(x, product.weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))
