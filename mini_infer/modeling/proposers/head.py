"""A one-layer head over the target's residual stream, which drafts without a KV cache of its own.

A draft's layer sees what the target's last one left: its residual stream at the last verified token
(as EAGLE does, arXiv 2401.15077, and DeepSeek's multi-token prediction, 2412.19437), and its keys
and values of all verified tokens (as GLIDE does, 2402.02082). So there is nothing to prefill, to
catch up with after steps without drafts, or to take back after a rejection.

Only frequent tokens are drafted (FR-Spec, arXiv 2502.14856): the head has copies of their rows of
the target's ``lm_head``, which would otherwise take longer than all else that a draft needs.

Letters in shapes: R requests, H query heads, D head size, Vd tokens that can be drafted.
"""

import torch
from torch import Tensor

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.kernels.query_rotation import rotate_queries
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.decoder_layer import DecoderLayer
from mini_infer.modeling.layers import GatedMLP, Layer, Linear, RMSNorm


class DraftHead(Layer):
    """One pre-norm block with the target's own shapes and conventions.

    ``x = hidden_proj(norm(h)) + token_proj(norm(e))``, where h is the residual stream at the token
    before and e the embedding of the token that stands now; then attention whose keys and values
    are the target's, and a gated feed-forward network, each added back. The sum is the residual
    stream that the next draft starts from; its logits come from ``compute_logits``.
    """

    token_ids: Tensor
    """``[Vd]`` int64, ascending: what each row of ``lm_head`` stands for."""

    def __init__(self, target: CausalLM, num_tokens: int) -> None:
        """A head for ``target`` that drafts ``num_tokens`` (Vd) tokens; weights are uninitialised.

        Raises:
            UnsupportedModelError: see ``last_layer``.
        """
        super().__init__()
        config, layer = target.config, last_layer(target)
        attention, size = layer.self_attn, config.hidden_size
        heads_size = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.scale = attention.attention.scale
        self.sliding_window = attention.attention.sliding_window
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.token_norm = RMSNorm(size, config.rms_norm_eps)
        self.hidden_proj = Linear(size, size)
        self.token_proj = Linear(size, size)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.q_proj = Linear(size, heads_size, _has_bias(attention.qkv_proj))
        if attention.head_norm:
            self.q_norm: RMSNorm | None = RMSNorm(config.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = None
        self.o_proj = Linear(heads_size, size, _has_bias(attention.o_proj))
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.mlp = GatedMLP(size, config.intermediate_size, _has_bias(layer.mlp.gate_up_proj))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = Linear(size, num_tokens)
        self.register_buffer("token_ids", torch.empty(num_tokens, dtype=torch.int64))

    def forward(
        self, hidden: Tensor, embedded: Tensor, rope: Rope, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        """``hidden, embedded [R, hidden]`` -> the residual stream ``[R, hidden]`` at the tokens
        that are embedded. ``cache`` is the target's last layer's; ``meta`` has one query a row, and
        as context the tokens whose keys are there."""
        x = self.token_proj(embedded, self.token_norm)
        x = self.hidden_proj.add_to(x, self.hidden_norm(hidden))
        q = self.q_proj(x, self.input_layernorm).view(len(x), -1, self.head_dim)
        norm = None if self.q_norm is None else self.q_norm.parameters_for(q.dtype)
        q = rotate_queries(q, rope, cache[0], norm)
        out = ops.paged_attention(q, *cache, meta, self.scale, self.sliding_window)
        x = self.o_proj.add_to(x, out.flatten(1))
        return self.mlp.add_to(x, self.post_attention_layernorm)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Rows of the residual stream ``[R, hidden]`` -> logits ``[R, Vd]`` of ``token_ids``."""
        logits: Tensor = self.lm_head(x, self.norm)
        return logits


def last_layer(target: CausalLM) -> DecoderLayer:
    """The layer whose conventions and keys a head shares.

    Raises:
        UnsupportedModelError: the architecture's layers are of another kind.
    """
    layer = target.layers[-1]
    if not isinstance(layer, DecoderLayer):
        raise UnsupportedModelError(
            f"{target.config.architecture} has no layers that a draft head can be made after: "
            "speculate with ngram or draft_model"
        )
    return layer


def _has_bias(product: Linear) -> bool:
    return product.bias is not None
