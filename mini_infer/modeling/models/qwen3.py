"""Qwen3 (arXiv 2505.09388): no QKV bias, but a norm on every query and key head.

The size of a head is a choice of its own, not ``hidden_size / num_heads``.
"""

from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.attention import GroupedQueryAttention
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.decoder_layer import DecoderLayer
from mini_infer.modeling.layers import GatedMLP


class Qwen3ForCausalLM(CausalLM):
    """Pre-norm blocks of grouped-query attention with QK norm, and SwiGLU."""

    def build_layer(self, config: ModelConfig, layer: int) -> DecoderLayer:
        bias = config.attention_bias  # none of the published models has one
        attention = GroupedQueryAttention(
            config, layer, qkv_bias=bias, out_bias=bias, head_norm=True
        )
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        return DecoderLayer(config, attention, mlp)
