"""Attention over the paged cache, and the grouped-query block that most architectures share.

Letters in shapes: T tokens of the step, H query heads, Hkv key-value heads, D head size.
"""

from torch import Tensor

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.kernels.reference import QKNorm
from mini_infer.modeling.layers import Layer, Linear, PackedLinear, RMSNorm

KVCache = tuple[Tensor, Tensor]
"""One layer's ``k_cache, v_cache``, each ``[num_blocks, block_size, Hkv, D]``."""


class PagedAttention(Layer):
    """Rotates a step's queries and keys (arXiv 2104.09864), adds keys and values to the paged
    cache, and attends causally over it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.layer_sliding_window(layer)

    def forward(
        self,
        qkv: Tensor,
        rope: Rope,
        cache: KVCache,
        meta: AttentionMetadata,
        qk_norm: QKNorm | None = None,
    ) -> Tensor:
        """``qkv [T, (H + 2 Hkv) * D]``, heads of queries, keys, values -> ``[T, H * D]``."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        return ops.attend(heads, rope, *cache, meta, self.scale, self.sliding_window, qk_norm)


class GroupedQueryAttention(Layer):
    """Grouped-query attention (arXiv 2305.13245).

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
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = tuple(count * config.head_dim for count in heads)
        self.qkv_proj = PackedLinear(config.hidden_size, rows, qkv_bias)
        self.o_proj = Linear(rows[0], config.hidden_size, out_bias)
        self.head_norm = head_norm
        if head_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attention = PagedAttention(config, layer)

    def add_to(
        self,
        residual: Tensor,
        norm: RMSNorm,
        rope: Rope,
        cache: KVCache,
        meta: AttentionMetadata,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """``residual [T, hidden] + attention(norm(residual))``, in place; or, of the tokens
        ``wanted [W]`` only, a new ``[W, hidden]``."""
        qkv = self.qkv_proj(residual, norm)
        out = self.attention(qkv, rope, cache, meta, self._qk_norm())
        if wanted is not None:
            residual, out = residual.index_select(0, wanted), out.index_select(0, wanted)
        return self.o_proj.add_to(residual, out)

    def _qk_norm(self) -> QKNorm | None:
        if not self.head_norm:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
