"""Matrix products with packed weights on a CPU, where a decode step is limited by reading weights.

Measured on SmolLM2-135M (docs/performance-notes.md): float16 weights in fbgemm's packed layout are
read at twice the speed of float32 ones, with float32 activations and accumulation; float32 weights
in oneDNN's blocked layout beat a plain product by two at small batches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""``x [T, in] float32 -> [T, out] float32``."""
FBGEMM_ROWS, FBGEMM_COLUMNS = 512, 16
"""fbgemm packs blocks of so many inputs and outputs, the last ones padded."""


def has_float16_products() -> bool:
    """Whether this build of torch and this processor offer float16 weights (fbgemm: x86 only)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def float16_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Packs ``weight [out, in]``; the result holds no reference to it."""
    packed = torch.ops.quantized.linear_prepack_fp16(
        weight.float(), bias if bias is None else bias.float()
    )
    apply = torch.ops.quantized.linear_dynamic_fp16.default

    def product(x: Tensor) -> Tensor:
        out: Tensor = apply(x, packed)
        return out

    return product


def has_blocked_products() -> bool:
    """Whether oneDNN is built in."""
    return bool(torch._C._has_mkldnn)


def blocked_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Reorders a float32 ``weight [out, in]``; the result holds no reference to it."""
    expected_batch = 8  # the layout serves any batch; this is where speed matters most
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), expected_batch)
    apply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        out: Tensor = apply(x, blocked, bias, "none", [], "")
        return out

    return product


def packed_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int | None:
    """What a product with packed weights keeps of a weight; None where there is none."""
    if dtype == torch.float16 and has_float16_products():
        inputs = -(-in_features // FBGEMM_ROWS) * FBGEMM_ROWS
        return -(-out_features // FBGEMM_COLUMNS) * FBGEMM_COLUMNS * inputs * dtype.itemsize
    if dtype == torch.float32 and has_blocked_products():
        return out_features * in_features * dtype.itemsize
    return None
