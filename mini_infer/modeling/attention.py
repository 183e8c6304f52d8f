"""Attention over the paged cache, and the grouped-query block that most architectures share.

Letters in shapes: T tokens of the step, H query heads, Hkv key-value heads, D head size.
"""

import torch
from torch import Tensor

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.layers import KVCache, Layer, Linear, PackedLinear, RMSNorm
from mini_infer.modeling.rotary import Rope


class PagedAttention(Layer):
    """Causal attention of a step's queries over the paged cache, after the step's keys join it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.layer_sliding_window(layer)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        """``q [T, H, D]``, ``k, v [T, Hkv, D]`` -> ``[T, H * D]``."""
        k_cache, v_cache = cache
        ops.write_kv(k, v, k_cache, v_cache, meta.slot_mapping)
        out = ops.paged_attention(q, k_cache, v_cache, meta, self.scale, self.sliding_window)
        return out.flatten(1)


class GroupedQueryAttention(Layer):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions (arXiv 2104.09864).

    What architectures choose differently is an argument: a bias on the projections of queries,
    keys and values, one on the output's, and a norm of each query and key head before it is
    rotated (arXiv 2302.05442).
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = tuple(heads * config.head_dim for heads in self.heads)
        self.qkv_proj = PackedLinear(config.hidden_size, rows, qkv_bias)
        self.o_proj = Linear(rows[0], config.hidden_size, out_bias)
        self.head_norm = head_norm
        if head_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attention = PagedAttention(config, layer)

    def forward(self, x: Tensor, rope: Rope, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """``x [T, hidden]`` -> ``[T, hidden]``."""
        heads = self.qkv_proj(x).view(len(x), sum(self.heads), -1)  # [T, H + 2 Hkv, D]
        qk, v = heads.split((sum(self.heads[:2]), self.heads[2]), dim=1)
        if self.head_norm:
            qk = self._normalise(qk)
        q, k = torch.split(ops.apply_rotary(qk, *rope), list(self.heads[:2]), dim=1)
        out: Tensor = self.o_proj(self.attention(q, k, v, cache, meta))
        return out

    def _normalise(self, qk: Tensor) -> Tensor:
        q, k = torch.split(qk, list(self.heads[:2]), dim=1)
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
