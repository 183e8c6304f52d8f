"""How many processes run a model's steps, and whether they can: asked before anything loads."""

import importlib.util
from typing import Any

from mini_infer.core.engine_config import AUTO
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.model_config import ModelConfig

PACKAGES = {"zmq": "pyzmq", "msgspec": "msgspec"}
"""Module to package of what processes need to talk."""


def resolve_ranks(given: dict[str, Any], model_config: ModelConfig) -> None:
    """Decides where steps run, once the device is known.

    Raises:
        InvalidConfigError: a size that does not fit the model or the GPUs that are there, or a
            package that is missing.
    """
    size: int = given["tensor_parallel_size"]
    if given["distributed_executor_backend"] == AUTO:
        given["distributed_executor_backend"] = "mp" if size > 1 else "local"
    if size < 1 or given["distributed_executor_backend"] == "local":
        return  # EngineConfig refuses what can't be
    from mini_infer.modeling.sharding import check_divides

    check_divides(model_config, size)
    _check_packages()
    if given["device"] == "cuda":
        _check_gpus(size)


def _check_packages() -> None:
    missing = [name for module, name in PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        raise InvalidConfigError(
            f"processes that share a model need {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}"
        )


def _check_gpus(size: int) -> None:
    import torch

    count = torch.cuda.device_count()
    if count < size:
        raise InvalidConfigError(
            f"tensor_parallel_size {size} needs as many GPUs, torch sees {count}: lower it, or "
            f"show more GPUs (CUDA_VISIBLE_DEVICES)"
        )
