"""The layers that architectures share. Weights are allocated uninitialised: a loader fills them.

Letters in shapes: T tokens of the step, Hkv key-value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels import ops
from mini_infer.kernels.cpu_linear import (
    Product,
    blocked_product,
    float16_product,
    has_blocked_products,
    has_float16_products,
)
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.rotary import Rope

KVCache = tuple[Tensor, Tensor]
"""One layer's ``k_cache, v_cache``, each ``[num_blocks, block_size, Hkv, D]``."""


def activation_dtype(weight: Tensor) -> torch.dtype:
    """Dtype of the arithmetic: the weights' own, but float32 for float16 weights on a CPU.

    There float16 only halves the memory that a step reads; processors add up in float32.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float16:
        return torch.float32
    return weight.dtype


class Layer(nn.Module):
    """A module that may rearrange its weights once they are loaded.

    Calling one is calling its ``forward``: torch's hooks, which inference does not use, would cost
    a tenth of a small model's decode step.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        setattr(cls, "__call__", cls.forward)  # noqa: B010 -- mypy allows no assignment to a method

    def finish_loading(self) -> None:
        """Called once, as soon as the last weight of this layer and of those within is in place."""


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(Layer):
    """``x [T, in] -> x @ weight.T + bias [T, out]`` with ``weight [out, in]``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _empty(out_features, in_features)
        self.bias = _empty(out_features) if bias else None
        self._product: Product = self._plain_product

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)

    def finish_loading(self) -> None:
        """On a CPU, replaces the weight by a packed copy in the layout that is read fastest."""
        weight, bias = self.weight.data, None if self.bias is None else self.bias.data
        if weight.device.type != "cpu":
            return
        if weight.dtype == torch.float16 and has_float16_products():
            self._product = float16_product(weight, bias)
        elif weight.dtype == torch.float32 and has_blocked_products():
            self._product = blocked_product(weight, bias)
        else:
            return
        del self.weight  # an embedding that shares it keeps it

    def _plain_product(self, x: Tensor) -> Tensor:
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


class PackedLinear(Linear):
    """Several projections of one input as one matrix product: their rows are stacked.

    ``out_features`` holds each part's rows; the model's ``packed_names`` says what a checkpoint
    calls the parts.
    """

    def __init__(self, in_features: int, out_features: tuple[int, ...], bias: bool = False) -> None:
        super().__init__(in_features, sum(out_features), bias)
        self.out_features = out_features


class Embedding(Layer):
    """``token_ids [T] -> [T, hidden]`` in the dtype of the arithmetic."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = _empty(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = nn.functional.embedding(token_ids, self.weight)
        return rows.to(activation_dtype(self.weight))


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _empty(size)
        self.eps = eps

    def finish_loading(self) -> None:
        """Keeps the weight in the dtype of the arithmetic: it is small, and used every step."""
        self.weight.data = self.weight.data.to(activation_dtype(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of ``x + residual``, ``x + residual``)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class GatedMLP(Layer):
    """SwiGLU feed-forward network (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = PackedLinear(hidden_size, (intermediate_size, intermediate_size), bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))
        return hidden


class DecoderLayer(Layer):
    """Pre-norm transformer block: attention, then a feed-forward network, each added back.

    The residual stream travels beside the activations, so that each addition is one kernel with
    the norm after it.
    """

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor, rope: Rope, cache: KVCache, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """``x, residual [T, hidden]`` -> the same pair after this block."""
        x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, rope, cache, meta)
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp(x), residual
