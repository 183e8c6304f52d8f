"""Bytes of a loaded model, and what is said when they are not there."""

from typing import Any

import psutil
import pytest
import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.kernels.cpu_linear import has_blocked_products, has_float16_products
from mini_infer.modeling.weight_memory import check_memory, weight_bytes
from mini_infer.modeling.weights import checkpoint_shapes
from tests.modeling.fakes import tiny_config
from tests.runtime.fake_executor import make_config

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parameters(config: Any) -> int:
    return sum(torch.Size(shape).numel() for shape in checkpoint_shapes(config).values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_gpu_holds_each_parameter_once(dtype: torch.dtype, tied: bool) -> None:
    config = tiny_config("Qwen2ForCausalLM", tie_word_embeddings=tied)
    assert weight_bytes(config, dtype, "cuda") == parameters(config) * dtype.itemsize


def test_a_cpu_holds_bfloat16_as_it_is() -> None:
    config = tiny_config(tie_word_embeddings=True)
    assert weight_bytes(config, torch.bfloat16, "cpu") == parameters(config) * 2


@pytest.mark.skipif(not has_blocked_products(), reason="no blocked float32 here")
@pytest.mark.parametrize("tied", [False, True])
def test_blocked_float32_takes_the_same_and_a_tied_table_is_there_twice(tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    again = 64 * 32 if tied else 0
    assert weight_bytes(config, torch.float32, "cpu") == (parameters(config) + again) * 4


@pytest.mark.skipif(not has_float16_products(), reason="no packed float16 here")
@pytest.mark.parametrize("tied", [False, True])
def test_packed_float16_is_padded_and_a_tied_table_is_there_twice(tied: bool) -> None:
    config = tiny_config(
        hidden_size=576, intermediate_size=520, vocab_size=100, tie_word_embeddings=tied
    )
    heads = 4 * 144 + 2 * 2 * 144
    layer = 1024 * heads + 1024 * 576 + 1024 * 2 * 528 + 1024 * 576
    layer -= 1024 * 2 * 528 - 1024 * 1040  # 520 rows twice, padded together
    norms = (2 * 2 + 1) * 576
    table, head = 100 * 576, 1024 * 112
    expected = 2 * (config.num_layers * layer + norms + table + head)
    assert weight_bytes(config, torch.float16, "cpu") == expected


def engine(**changes: Any) -> EngineConfig:
    return make_config(**({"model_config": tiny_config(), "dtype": "float32"} | changes))


def set_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    class Memory:
        available = free

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


def test_what_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, weight_bytes(tiny_config(), torch.float32, "cpu"))
    check_memory(engine())


def test_a_dtype_that_would_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = tiny_config(hidden_size=512, intermediate_size=1024)
    set_free(monkeypatch, weight_bytes(wide, torch.float32, "cpu") - 1)
    with pytest.raises(OutOfMemoryError, match=r"are free: dtype float16 would fit with .* GiB"):
        check_memory(engine(model_config=wide))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_else_the_size_that_would_fit_is(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    set_free(monkeypatch, 10**3)
    with pytest.raises(OutOfMemoryError, match=r"at most 0\.0 billion parameters"):
        check_memory(engine(dtype=dtype))


def test_memory_that_torch_holds_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weight_bytes(tiny_config(), torch.bfloat16, "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed - 100, 2 * needed))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 50)
    config = engine(device="cuda", dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 150)
    check_memory(config)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 149)
    with pytest.raises(OutOfMemoryError, match="GiB are free on Card: at most"):
        check_memory(config)
