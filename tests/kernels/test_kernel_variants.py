"""What a kernel is compiled again for."""

import importlib
import pkgutil
from typing import Any

import pytest

pytest.importorskip("triton")

from mini_infer.kernels import triton as kernels

PARTS_OF_AN_UPLOAD = {
    "cu_seqlens_q",
    "num_tokens_ptr",
    "positions",
    "slots",
    "slots_ptr",
    "starts",
}
"""Arguments that are views of a larger tensor: whether 16 divides their addresses depends on the
step."""


def launched_kernels() -> dict[str, Any]:
    modules = pkgutil.iter_modules(kernels.__path__, kernels.__name__ + ".")
    return {
        name: value
        for module in modules
        for name, value in vars(importlib.import_module(module.name)).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }


@pytest.mark.parametrize("kernel", launched_kernels().values(), ids=launched_kernels())
def test_an_address_that_a_step_decides_makes_no_other_variant(kernel: Any) -> None:
    options = getattr(kernel, "kwargs", None) or vars(
        kernel
    )  # the interpreter's, or the compiler's
    views = PARTS_OF_AN_UPLOAD & set(kernel.arg_names)
    assert views <= set(options["do_not_specialize_on_alignment"] or ())
