"""Which implementation of attention ``auto`` becomes, and what is said where one can't be had."""

import importlib.util

import pytest

from mini_infer.core.errors import InvalidConfigError
from mini_infer.runtime import resolve


@pytest.fixture(params=[True, False], ids=["with Triton", "without Triton"])
def has_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    found = importlib.util.spec_from_loader("triton", loader=None) if request.param else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    return bool(request.param)


@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_a_cpu_has_one(asked: str, has_triton: bool) -> None:
    assert resolve._attention_backend(asked, "cpu") == "torch"


def test_auto_on_a_gpu_is_triton_where_it_is_installed(has_triton: bool) -> None:
    assert resolve._attention_backend("auto", "cuda") == ("triton" if has_triton else "torch")
    assert resolve._attention_backend("torch", "cuda") == "torch"


@pytest.mark.parametrize("asked", ["triton", "flash_attn"])
def test_a_gpus_backend_on_a_cpu_is_refused(asked: str, has_triton: bool) -> None:
    with pytest.raises(InvalidConfigError, match=f"{asked}.* needs a GPU"):
        resolve._attention_backend(asked, "cpu")


@pytest.mark.parametrize("asked", ["triton", "flash_attn"])
def test_triton_that_is_not_installed_is_named(asked: str, has_triton: bool) -> None:
    if has_triton:
        assert resolve._attention_backend(asked, "cuda") == asked
        return
    with pytest.raises(InvalidConfigError, match="pip install triton"):
        resolve._attention_backend(asked, "cuda")
