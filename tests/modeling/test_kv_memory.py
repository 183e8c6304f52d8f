"""The KV cache is refused where it does not fit, before the system kills the process."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from mini_infer.core.errors import OutOfMemoryError
from mini_infer.core.kv_layout import KVLayout
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.kv_memory import allocate_kv_cache, bytes_per_block, num_blocks_that_fit
from tests.runtime.fake_executor import make_config
from tests.runtime.tiny_model import tiny_engine

LAYOUT = KVLayout(num_kv_heads=2, head_dim=4)


@pytest.mark.parametrize("num_missing_bytes", [0, 1])
def test_a_cache_beyond_the_free_memory(
    num_missing_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(block_size=4)
    free = 10 * bytes_per_block(config, LAYOUT, torch.float32) - num_missing_bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    if num_missing_bytes:
        with pytest.raises(OutOfMemoryError, match=r"10 blocks.*lower kv_cache_memory"):
            allocate_kv_cache(config, LAYOUT, 10, torch.float32)
    else:
        caches = allocate_kv_cache(config, LAYOUT, 10, torch.float32)
        assert caches[0][0].shape == (10, 4, 2, 4)


def test_memory_for_less_than_a_block() -> None:
    config = make_config(block_size=4, num_kv_blocks=None)
    size = bytes_per_block(config, LAYOUT, torch.float32)
    one_short = make_config(block_size=4, num_kv_blocks=None, kv_cache_memory=size - 1)
    with pytest.raises(OutOfMemoryError, match=f"one takes {size} bytes"):
        num_blocks_that_fit(one_short, LAYOUT, torch.float32)


def test_a_draft_model_has_a_share_of_each_block() -> None:
    """Its keys and values are in the same blocks, so both have as many."""
    draft = replace(make_config().model_config, num_layers=5, num_kv_heads=1, head_dim=6)
    options: dict[str, Any] = {"num_kv_blocks": None, "block_size": 4}
    plain = make_config(**options)
    own = bytes_per_block(plain, LAYOUT, torch.float32)
    both = own + 4 * 5 * KVLayout(num_kv_heads=1, head_dim=6).bytes_per_token(4)
    speculation = SpeculativeConfig(
        method="draft_model", model="x", model_config=draft, on_device=True
    )
    options |= {"speculative_config": speculation, "kv_cache_memory": 3 * both}
    config = make_config(**options)
    assert bytes_per_block(config, LAYOUT, torch.float32) == both
    assert num_blocks_that_fit(config, LAYOUT, torch.float32) == 3


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_an_allocator_that_refuses_is_a_typed_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(DeviceState, "__init__", refuse)
    with pytest.raises(OutOfMemoryError, match="max_num_seqs"):
        tiny_engine()


def test_a_fault_of_another_kind_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(DeviceState, "__init__", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        tiny_engine()
