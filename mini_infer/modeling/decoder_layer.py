"""The transformer block that most architectures share."""

from torch import Tensor

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.modeling.attention import GroupedQueryAttention, KVCache
from mini_infer.modeling.layers import GatedMLP, Layer, RMSNorm


class DecoderLayer(Layer):
    """Pre-norm transformer block: attention, then a feed-forward network, each added back."""

    def __init__(
        self, config: ModelConfig, self_attn: GroupedQueryAttention, mlp: GatedMLP
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        cache: KVCache,
        meta: AttentionMetadata,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """``x [T, hidden]``, the residual stream, after this block; x itself is overwritten.

        Of the tokens ``wanted [W]``, where given, it returns ``[W, hidden]``, and of the others it
        computes no more than their keys and values.
        """
        x = self.self_attn.add_to(x, self.input_layernorm, rope, cache, meta, wanted)
        return self.mlp.add_to(x, self.post_attention_layernorm)
