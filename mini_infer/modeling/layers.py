"""The layers that architectures share. Weights are allocated uninitialised: a loader fills them.

Letters in shapes: T tokens of the step.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mini_infer.kernels import ops
from mini_infer.kernels.cpu_linear import (
    Product,
    blocked_product,
    float16_product,
    has_blocked_products,
    has_float16_products,
)
from mini_infer.kernels.reference import Norm


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
    """``x [T, in] -> norm(x) @ weight.T + bias [T, out]`` with ``weight [out, in]``.

    A product takes the norm before it and the sum after it along, so that a device may make one
    kernel of them.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _empty(out_features, in_features)
        self.bias = _empty(out_features) if bias else None
        self._packed: Product | None = None

    def forward(
        self, x: Tensor, norm: "RMSNorm | None" = None, out: Tensor | None = None
    ) -> Tensor:
        """``out [T, out]`` is where a GPU shall put the product, for a CUDA graph."""
        if self._packed is not None:
            return self._packed(x if norm is None else norm(x))
        x, parameters = (x, None) if norm is None else norm.before_product(x)
        return ops.linear(x, *self._parameters_for(x.dtype), parameters, out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Adds the product of ``x`` to ``residual [T, out]`` in place, and returns it."""
        if self._packed is not None:
            return residual.add_(self._packed(x))
        return ops.add_linear_(residual, x, *self._parameters_for(x.dtype))

    def finish_loading(self) -> None:
        """On a CPU, replaces the weight by a packed copy in the layout that is read fastest."""
        weight, bias = self.weight.data, None if self.bias is None else self.bias.data
        if weight.device.type != "cpu":
            return
        if weight.dtype == torch.float16 and has_float16_products():
            self._packed = float16_product(weight, bias)
        elif weight.dtype == torch.float32 and has_blocked_products():
            self._packed = blocked_product(weight, bias)
        else:
            return
        del self.weight  # an embedding that shares it keeps it

    def _parameters_for(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        bias = self.bias if self.bias is None else self.bias.to(dtype)
        return self.weight.to(dtype), bias


class PackedLinear(Linear):
    """Several projections of one input as one matrix product: their rows are stacked.

    ``out_features`` holds each part's rows; the model's ``packed_names`` says what a checkpoint
    calls the parts.
    """

    def __init__(self, in_features: int, out_features: tuple[int, ...], bias: bool = False) -> None:
        super().__init__(in_features, sum(out_features), bias)
        self.out_features = out_features


class GatedLinear(PackedLinear):
    """The gate and up projections of SwiGLU (arXiv 2002.05202)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, (out_features, out_features), bias)

    def gated(self, x: Tensor, norm: "RMSNorm | None" = None) -> Tensor:
        """``silu(gate(norm(x))) * up(norm(x))``."""
        if self._packed is not None:
            return ops.silu_and_mul(self(x, norm))
        x, parameters = (x, None) if norm is None else norm.before_product(x)
        return ops.gated_linear(x, *self._parameters_for(x.dtype), parameters)


class Embedding(Layer):
    """``token_ids [T] -> [T, hidden]`` in the dtype of the arithmetic."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = _empty(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = ops.embedding(token_ids, self.weight)
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

    def before_product(self, x: Tensor) -> tuple[Tensor, Norm | None]:
        """``x``, and the norm for the product to take along; or the norm of ``x``, and None."""
        return x, self.parameters_for(x.dtype)

    def parameters_for(self, dtype: torch.dtype) -> Norm:
        """Weight and epsilon for arithmetic in ``dtype``: what a fused kernel takes."""
        return self.weight.to(dtype), self.eps


class GatedMLP(Layer):
    """SwiGLU feed-forward network (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(self.gate_up_proj.gated(x))
        return hidden

    def add_to(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """``residual + mlp(norm(residual))``, in place."""
        return self.down_proj.add_to(residual, self.gate_up_proj.gated(residual, norm))
