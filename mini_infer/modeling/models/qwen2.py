"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on Q, K and V only."""

from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.attention import GroupedQueryAttention
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.decoder_layer import DecoderLayer
from mini_infer.modeling.layers import GatedMLP


class Qwen2ForCausalLM(CausalLM):
    """Pre-norm blocks of grouped-query attention with QKV bias, and SwiGLU."""

    def build_layer(self, config: ModelConfig, layer: int) -> DecoderLayer:
        attention = GroupedQueryAttention(config, layer, qkv_bias=True)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        return DecoderLayer(config, attention, mlp)
