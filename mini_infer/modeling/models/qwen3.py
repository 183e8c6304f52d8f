"""Qwen3 (arXiv 2505.09388): no QKV bias, but a norm on every query and key head.

The size of a head is a choice of its own, not ``hidden_size / num_heads``.
"""

from torch import Tensor

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.layers import (
    DecoderLayer,
    GatedMLP,
    KVCache,
    Layer,
    Linear,
    PackedLinear,
    PagedAttention,
    RMSNorm,
)
from mini_infer.modeling.rotary import Rope


class Qwen3Attention(Layer):
    """Grouped-query attention with queries and keys normalised per head (arXiv 2302.05442)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = tuple(heads * config.head_dim for heads in self.heads)
        self.qkv_proj = PackedLinear(config.hidden_size, rows, config.attention_bias)
        self.o_proj = Linear(rows[0], config.hidden_size, config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attention = PagedAttention(config, layer)

    def forward(self, x: Tensor, rope: Rope, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """``x [T, hidden]`` -> ``[T, hidden]``."""
        heads = self.qkv_proj(x).view(len(x), sum(self.heads), -1)  # [T, H + 2 Hkv, D]
        q, k, v = heads.split(self.heads, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = ops.apply_rotary(q, *rope), ops.apply_rotary(k, *rope)
        out: Tensor = self.o_proj(self.attention(q, k, v, cache, meta))
        return out


class Qwen3ForCausalLM(CausalLM):
    """Pre-norm blocks of grouped-query attention with QK norm, and SwiGLU."""

    def build_layer(self, config: ModelConfig, layer: int) -> DecoderLayer:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        return DecoderLayer(config, Qwen3Attention(config, layer), mlp)
