"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on Q, K and V only."""

import torch
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
)
from mini_infer.modeling.rotary import Rope


class Qwen2Attention(Layer):
    """Grouped-query attention whose Q, K and V projections carry a bias."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = tuple(heads * config.head_dim for heads in self.heads)
        self.qkv_proj = PackedLinear(config.hidden_size, rows, bias=True)
        self.o_proj = Linear(rows[0], config.hidden_size)
        self.attention = PagedAttention(config, layer)

    def forward(self, x: Tensor, rope: Rope, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """``x [T, hidden]`` -> ``[T, hidden]``."""
        heads = self.qkv_proj(x).view(len(x), sum(self.heads), -1)  # [T, H + 2 Hkv, D]
        qk, v = heads.split((sum(self.heads[:2]), self.heads[2]), dim=1)
        q, k = torch.split(ops.apply_rotary(qk, *rope), list(self.heads[:2]), dim=1)
        out: Tensor = self.o_proj(self.attention(q, k, v, cache, meta))
        return out


class Qwen2ForCausalLM(CausalLM):
    """Pre-norm blocks of grouped-query attention with QKV bias, and SwiGLU."""

    def build_layer(self, config: ModelConfig, layer: int) -> DecoderLayer:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        return DecoderLayer(config, Qwen2Attention(config, layer), mlp)
