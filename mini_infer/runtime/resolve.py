"""From what a user typed to a concrete engine: every ``auto`` is decided here, once.

torch is imported only when a real model is asked for.
"""

import difflib
import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.core.engine_config import (
    AUTO,
    DEFAULT_MODEL,
    MAX_DEPTH,
    EngineConfig,
    engine_options,
)
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.model_config import ModelConfig
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.runtime.executor import Executor
from mini_infer.runtime.resolve_parallel import cluster_has_gpus, resolve_ranks
from mini_infer.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_infer.modeling.model_files import ModelFiles

logger = logging.getLogger(__name__)

CHUNK_TOKENS = {"cpu": 128, "cuda": 8192}
"""Default token budget of a step. Larger chunks use a processor no better, smaller ones let running
requests go on sooner: see docs/chunked-prefill.md."""
NUM_SEQS = {"cpu": 64, "cuda": 256}
DRY_RUN_NAME = "dry-run"
BFLOAT16_CAPABILITY = (8, 0)
"""Older GPUs multiply bfloat16 without tensor cores, if at all."""
PIPELINE_DEPTH = {"cpu": 1, "cuda": 2}
KV_FRACTION = 0.25
"""Share of the free memory that the KV cache takes on a CPU, where other programs run too."""
KV_LIMIT = 4 * 2**30
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_UNITS |= {
    unit + "b": size for unit, size in list(_UNITS.items()) if len(unit) == 1 and unit != "b"
}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "tb": 10**12}


def resolve_engine(options: Mapping[str, Any]) -> tuple[EngineConfig, Executor, Tokenizer]:
    """Builds configuration, executor and tokenizer from option names of ``EngineConfig``.

    Raises:
        InvalidConfigError: an unknown option, or a value that can't work.
        ModelNotFoundError, UnsupportedModelError: the model can't be used.
    """
    config, executor = resolve_core(options)
    return config, executor, load_tokenizer(locate_tokenizer(options))


def resolve_core(options: Mapping[str, Any]) -> tuple[EngineConfig, Executor]:
    """What ``EngineCore`` needs: the half of ``resolve_engine`` that knows no text."""
    given = parse_options(options)
    if given["dry_run"]:
        return _dry_run_core(given)
    from mini_infer.modeling.model_files import load_model_config, locate_model

    files = locate_model(given["model"])
    model_config = load_model_config(files)
    config = resolve_config(given, model_config, files)
    if config.distributed_executor_backend == "mp":
        from mini_infer.runtime.mp_executor import MultiProcessExecutor

        return config, MultiProcessExecutor(config, files)
    if config.distributed_executor_backend == "ray":
        from mini_infer.runtime.ray_executor import RayExecutor

        return config, RayExecutor(config, files)
    from mini_infer.runtime.local_executor import LocalExecutor  # torch: only once there is a model

    return config, LocalExecutor(config, files)


def locate_tokenizer(options: Mapping[str, Any]) -> Path | None:
    """The folder of the model's tokenizer, fetching the model the first time; None where bytes are
    tokens. Another process can go on from here with ``load_tokenizer``, which needs no torch."""
    given = parse_options(options)
    if given["dry_run"]:
        return None
    from mini_infer.modeling.model_files import locate_model

    folder = locate_model(given["model"]).folder
    if given["load_format"] == "dummy" and not (folder / "tokenizer.json").exists():
        return None  # random weights need no words
    return folder


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer that ``locate_tokenizer`` found."""
    if folder is None:
        from mini_infer.runtime.byte_tokenizer import ByteTokenizer

        return ByteTokenizer()
    from mini_infer.runtime.tokenizer import HFTokenizer

    return HFTokenizer.from_folder(folder)


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks names and converts values of every option; what is not given gets its default.

    Raises:
        InvalidConfigError: an unknown option, or a value of the wrong kind.
    """
    known = engine_options()
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise InvalidConfigError(f"there is no option {name!r}{hint}")
    return {
        name: _convert(name, options.get(name, option["default"]), option)
        for name, option in known.items()
    }


def parse_size(text: str) -> int:
    """Bytes from ``"2GiB"``, ``"512 MB"`` or a plain number.

    Raises:
        ValueError: neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size such as 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _convert(name: str, value: Any, option: Mapping[str, Any]) -> Any:
    default, choices, kind = option["default"], option["choices"], option["kind"]
    if value is None or value == AUTO:
        return default
    if kind is SpeculativeConfig:
        from mini_infer.runtime.resolve_speculation import parse_speculation

        return parse_speculation(value)
    if choices:
        if value not in choices:
            raise InvalidConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        return value
    try:
        if name == "kv_cache_memory" and isinstance(value, str):
            return parse_size(value)
        if kind in (int, float):
            if isinstance(value, bool) or (kind is int and int(value) != value):
                raise ValueError
            return kind(value)
    except (ValueError, TypeError, OverflowError):
        rule = "a number" if kind is float else "an integer"
        if name == "kv_cache_memory":
            rule = "a size such as 2GiB"
        raise InvalidConfigError(f"{name} must be {rule}, got {value!r}") from None
    if not isinstance(value, kind):
        if kind is str and isinstance(value, Path):
            return str(value)
        raise InvalidConfigError(f"{name} must be {kind.__name__}, got {value!r}")
    return value


def _dry_run_core(given: dict[str, Any]) -> tuple[EngineConfig, Executor]:
    from mini_infer.runtime.dry_run import DryRunExecutor, dry_run_model_config

    model_config = dry_run_model_config()
    given |= {"device": "cpu", "dtype": "float32", "attention_backend": "torch"}
    given |= {"load_format": "dummy", "tensor_parallel_size": 1}  # no weights to spread
    given["pipeline_parallel_size"] = 1
    given["distributed_executor_backend"] = "local"
    if given["served_model_name"] == AUTO and given["model"] == DEFAULT_MODEL:
        given["served_model_name"] = DRY_RUN_NAME  # nobody should take it for the model
    _resolve_lengths(given, model_config)
    if (said := given["speculative_config"]) is not None:
        from mini_infer.runtime.resolve_speculation import resolve_speculation

        given["speculative_config"] = resolve_speculation(said, given, model_config)
    if given["kv_cache_memory"] == AUTO:
        given["kv_cache_memory"] = KV_LIMIT
    config = EngineConfig(model_config=model_config, **given)
    return config, DryRunExecutor(config)


def resolve_config(
    given: dict[str, Any], model_config: ModelConfig, files: "ModelFiles"
) -> EngineConfig:
    """From what ``parse_options`` returned to the concrete engine of a model; fills in ``given``.

    Raises:
        InvalidConfigError: a value that can't work, with this model or on this machine.
        ModelNotFoundError, UnsupportedModelError: a draft model can't be used.
    """
    import torch

    has_gpu = torch.cuda.is_available() or (given["device"] != "cpu" and cluster_has_gpus(given))
    if given["device"] == AUTO:
        given["device"] = "cuda" if has_gpu else "cpu"
    elif given["device"] == "cuda" and not has_gpu:
        raise InvalidConfigError("device 'cuda' was asked for, but torch sees no GPU")
    resolve_ranks(given, model_config)
    if given["dtype"] == AUTO:
        given["dtype"] = _fastest_dtype(given["device"], model_config)
    if given["load_format"] == AUTO:
        given["load_format"] = "gguf" if files.weights.suffix == ".gguf" else "safetensors"
    given["attention_backend"] = _attention_backend(given["attention_backend"], given["device"])
    _resolve_lengths(given, model_config)
    speculation: SpeculativeConfig | None = None
    if (said := given["speculative_config"]) is not None:
        from mini_infer.runtime.resolve_speculation import resolve_speculation

        speculation = resolve_speculation(said, given, model_config, files.folder)
        given["speculative_config"] = speculation
    models = [model_config]
    if speculation is not None and speculation.model_config is not None:
        models.append(speculation.model_config)
    if given["attention_backend"] == "flash_attn":
        from mini_infer.kernels.flash_attention import check_available

        capability = torch.cuda.get_device_capability()
        for model in models:
            check_available(capability, given["block_size"], model.head_dim, given["dtype"])
    if given["kv_cache_memory"] == AUTO:
        on_cpu = given["device"] == "cpu"
        given["kv_cache_memory"] = _default_kv_memory(given, models) if on_cpu else None
    config = EngineConfig(model_config=model_config, **given)
    logger.info(
        "%s: weights %s on %s, context %d, %d tokens a step, depth %d",
        *(config.model, config.dtype, config.device, config.max_model_len),
        *(config.max_num_batched_tokens, config.depth),
    )
    if config.speculative_config is not None:
        logger.info("speculative decoding: %s", config.speculative_config)
    return config


def _fastest_dtype(device: str, model_config: ModelConfig) -> str:
    """By rule, measured in docs/performance-notes.md: the fewest bytes that products read quickly
    and that do not change the text."""
    if device == "cuda":
        import torch

        # Elsewhere, where GPUs of a cluster are: they will not be as old as that.
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < BFLOAT16_CAPABILITY:
            return "float16"
        return model_config.dtype if model_config.dtype in ("float16", "bfloat16") else "bfloat16"
    from mini_infer.kernels.cpu_linear import has_float16_products

    return "float16" if has_float16_products() else "float32"


def _attention_backend(asked: str, device: str) -> str:
    has_triton = importlib.util.find_spec("triton") is not None
    if asked == AUTO:
        return "triton" if device == "cuda" and has_triton else "torch"
    if asked in ("triton", "flash_attn") and device != "cuda":
        raise InvalidConfigError(
            f"attention_backend {asked!r} needs a GPU: leave it at auto, or give device 'cuda'"
        )
    if asked in ("triton", "flash_attn") and not has_triton:  # which writes the cache for both
        raise InvalidConfigError(
            f"attention_backend {asked!r} needs the package triton: pip install triton"
        )
    return asked


def _resolve_lengths(given: dict[str, Any], model_config: ModelConfig) -> None:
    limit = model_config.max_context
    if given["served_model_name"] == AUTO:
        given["served_model_name"] = given["model"]
    if given["max_model_len"] == AUTO:
        given["max_model_len"] = limit
    elif given["max_model_len"] > limit:
        raise InvalidConfigError(
            f"max_model_len {given['max_model_len']} exceeds the model's context of {limit} tokens"
        )
    if given["max_num_seqs"] == AUTO:
        given["max_num_seqs"] = NUM_SEQS[given["device"]]
    if given["depth"] == AUTO:
        num_stages = given["pipeline_parallel_size"]
        given["depth"] = PIPELINE_DEPTH[given["device"]]
        if num_stages > 1:  # a step for each stage, and one that waits for the first
            given["depth"] = min(num_stages + (given["speculative_config"] is None), MAX_DEPTH)
    if given["max_num_batched_tokens"] == AUTO:
        budget = CHUNK_TOKENS[given["device"]]
        if not given["enable_chunked_prefill"]:
            budget = max(budget, given["max_model_len"])
        given["max_num_batched_tokens"] = max(budget, given["max_num_seqs"])


def _default_kv_memory(given: Mapping[str, Any], models: Sequence[ModelConfig]) -> int:
    """A quarter of the free memory, at most 4 GiB, and no more than all slots could ever fill."""
    import psutil

    wide = given["dtype"] != "bfloat16"  # float16 weights are multiplied, and cached, in float32
    bytes_per_token = sum(
        model.num_layers * model.kv_layout.bytes_per_token(4 if wide else 2) for model in models
    )
    block: int = max(given["block_size"], 1)  # EngineConfig refuses what is smaller
    longest = -(-given["max_model_len"] // block) * block
    demand: int = given["max_num_seqs"] * longest * bytes_per_token
    free = int(psutil.virtual_memory().available * KV_FRACTION)
    return max(min(demand, free, KV_LIMIT), block * bytes_per_token)
