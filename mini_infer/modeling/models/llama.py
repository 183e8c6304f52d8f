"""Llama (arXiv 2302.13971, 2407.21783): SmolLM2, Llama 2 and 3, and Mistral (2310.06825)."""

from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.attention import GroupedQueryAttention
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.decoder_layer import DecoderLayer
from mini_infer.modeling.layers import GatedMLP


class LlamaForCausalLM(CausalLM):
    """Pre-norm blocks of grouped-query attention and SwiGLU; biases where the config has them."""

    def build_layer(self, config: ModelConfig, layer: int) -> DecoderLayer:
        bias = config.attention_bias
        attention = GroupedQueryAttention(config, layer, qkv_bias=bias, out_bias=bias)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        return DecoderLayer(config, attention, mlp)
