"""Every ``auto`` gets a value, every bad value an error that names its option."""

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError, ModelNotFoundError
from mini_infer.runtime.resolve import (
    CHUNK_TOKENS,
    KV_LIMIT,
    parse_options,
    parse_size,
    resolve_engine,
)


def resolved(model: Path, **options: Any) -> EngineConfig:
    config, _, _ = resolve_engine({"model": str(model), **options})
    return config


def test_defaults_on_a_cpu(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = resolved(tiny_folder)
    assert (config.device, config.dtype, config.load_format) == ("cpu", "float16", "safetensors")
    assert config.model == config.served_model_name == str(tiny_folder)
    assert config.max_model_len == config.model_config.max_position_embeddings == 128
    assert config.max_num_batched_tokens == CHUNK_TOKENS["cpu"]
    assert config.depth == 1
    assert config.num_kv_blocks is None


def test_defaults_on_a_gpu(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolved only: nothing is put on a device before the executor starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    config = resolved(tiny_folder)
    assert (config.device, config.dtype, config.depth) == ("cuda", "bfloat16", 2)
    assert config.max_num_batched_tokens == CHUNK_TOKENS["cuda"]
    assert resolved(tiny_folder, device="cpu").device == "cpu"


def test_a_gpu_too_old_for_bfloat16(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert resolved(tiny_folder).dtype == "float16"
    assert resolved(tiny_folder, dtype="bfloat16").dtype == "bfloat16"


def test_a_gpu_that_is_not_there(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidConfigError, match="torch sees no GPU"):
        resolved(tiny_folder, device="cuda")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_given_stays(tiny_folder: Path, dtype: Any) -> None:
    config = resolved(
        tiny_folder,
        device="cpu",
        dtype=dtype,
        load_format="dummy",
        attention_backend="torch",
        served_model_name="my-model",
        max_model_len=64,
        max_num_batched_tokens=33,
        max_num_seqs=3,
        depth=2,
        kv_cache_memory="1MiB",
        num_kv_blocks=9,
        block_size=8,
    )
    assert config.dtype == dtype
    assert config.served_model_name == "my-model"
    assert config.load_format == "dummy"
    assert (config.max_model_len, config.max_num_batched_tokens, config.max_num_seqs) == (64, 33, 3)
    assert (config.depth, config.kv_cache_memory, config.num_kv_blocks) == (2, 2**20, 9)
    assert config.max_blocks_per_request == 8


def test_a_path_is_a_model(tiny_folder: Path) -> None:
    assert parse_options({"model": tiny_folder})["model"] == str(tiny_folder)


def test_more_than_the_models_context_says_both(tiny_folder: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"\b129\b.*\b128\b"):
        resolved(tiny_folder, max_model_len=129)


def test_the_budget_holds_a_token_of_every_request(tiny_folder: Path) -> None:
    assert resolved(tiny_folder, device="cpu", max_num_seqs=500).max_num_batched_tokens == 500


def test_without_chunked_prefill_the_budget_holds_a_whole_prompt() -> None:
    config, _, _ = resolve_engine({"dry_run": True, "enable_chunked_prefill": False})
    assert config.max_num_batched_tokens >= config.max_model_len > CHUNK_TOKENS["cpu"]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (2**40, 64 * 128 * 256),  # no more than all slots can fill: 256 bytes a token
        (2**20, 2**18),  # a quarter of what is free
        (0, 16 * 256),  # one block at least: the engine then says what does not fit
    ],
)
def test_memory_for_the_kv_cache(
    tiny_folder: Path, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = free

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    config = resolved(tiny_folder, device="cpu")
    model = config.model_config
    bytes_per_token = 2 * model.num_kv_heads * model.head_dim * model.num_layers * 4
    assert config.kv_cache_memory == expected * bytes_per_token // 256
    assert config.kv_cache_memory <= KV_LIMIT


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5k", 1500),
        ("10b", 10),
        ("1TiB", 2**40),
        ("3tb", 3 * 10**12),
        (" 7 kb ", 7000),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_options({"kv_cache_memory": text})["kv_cache_memory"] == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1..5G", "2 XiB", "1e9", "2GiB2", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)
    with pytest.raises(InvalidConfigError, match="kv_cache_memory must be a size such as 2GiB"):
        parse_options({"kv_cache_memory": text})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": "many"}, "block_size must be an integer"),
        ({"block_size": 1.5}, "block_size must be an integer"),
        ({"block_size": True}, "block_size must be an integer"),
        ({"block_size": [1]}, "block_size must be an integer"),
        ({"depth": float("nan")}, "depth must be an integer"),
        ({"depth": float("inf")}, "depth must be an integer"),
        ({"kv_cache_memory": [1]}, "kv_cache_memory must be a size"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16"),
        ({"device": "tpu"}, "device must be one of cpu, cuda"),
        ({"load_format": "pickle"}, "load_format must be one of safetensors, gguf, dummy"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching must be bool"),
        ({"scheduling_policy": 3}, "scheduling_policy must be str"),
        ({"model": 3}, "model must be str"),
        ({"model_config": {}}, "no option 'model_config'"),
        ({"max_model_length": 4}, "did you mean 'max_model_len'"),
    ],
    ids=str,
)
def test_a_bad_value_names_its_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError) as error:
        parse_options(options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["block_size", "num_kv_blocks", "max_num_seqs", "depth", "kv_cache_memory", "max_model_len"],
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_value_below_one(name: str, value: int) -> None:
    with pytest.raises(InvalidConfigError, match=rf"{name} must be .*\b1\b.*, got {value}"):
        resolve_engine({"dry_run": True, name: value})


@pytest.mark.parametrize("value", [None, "auto"])
def test_nothing_and_auto_mean_the_default(value: Any) -> None:
    names = ("block_size", "dtype", "kv_cache_memory", "max_model_len")
    assert parse_options(dict.fromkeys(names, value)) == parse_options({})


def test_a_whole_float_is_an_integer() -> None:
    assert parse_options({"depth": 2.0})["depth"] == 2


def test_an_unknown_model() -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-thing"):
        resolve_engine({"model": "no-such-thing"})


def test_random_weights_need_no_weights(tiny_folder: Path, tmp_path: Path) -> None:
    """``--load-format dummy`` builds any architecture from its config alone."""
    folder = tmp_path / "light"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    _, executor, _ = resolve_engine(
        {"model": str(folder), "load_format": "dummy", "num_kv_blocks": 3, "device": "cpu"}
    )
    assert executor.start() == 3
    executor.shutdown()
