"""A driver of Triton's that claims an H100 to be there, so that kernels compile without a GPU."""

from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

LANGUAGE = (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype, tl.core.tensor_descriptor_base)
AS_IMPORTED = [(owner, dict(vars(owner))) for owner in LANGUAGE]
"""Triton's interpreter replaces what kernels are written in by its own, and leaves it there: the
other tests' kernels run in it, after this file is imported."""


class FakeDriver:
    """Compiles for an H100; counts what is loaded, by which thread, and what is launched."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launched = 0
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded.append(current_thread().name)
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return self._launch

    def _launch(self, *_: Any) -> None:
        self.launched += 1


def fake_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Installs a driver for the length of a test."""
    fake = FakeDriver()
    for owner, names in AS_IMPORTED:
        for name, value in vars(owner).copy().items():
            if name not in names:
                monkeypatch.delattr(owner, name)
            elif value is not names[name]:
                monkeypatch.setattr(owner, name, names[name])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(driver, "_active", fake)
    return fake
