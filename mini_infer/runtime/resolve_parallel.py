"""How many processes run a model's steps, and whether they can: asked before anything loads."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from mini_infer.core.engine_config import AUTO
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.model_config import ModelConfig

PACKAGES = {"zmq": "pyzmq", "msgspec": "msgspec"}
"""Module to package of what processes need to talk."""
RAY_PACKAGES = {"ray": "'mini-infer[ray]'"}


def resolve_ranks(given: dict[str, Any], model_config: ModelConfig) -> None:
    """Decides where steps run, once the device is known.

    Raises:
        InvalidConfigError: a size that does not fit the model or the GPUs that are there, or a
            package that is missing.
    """
    size: int = given["tensor_parallel_size"]
    num_stages: int = given["pipeline_parallel_size"]
    if given["distributed_executor_backend"] == AUTO:
        given["distributed_executor_backend"] = "mp" if max(size, num_stages) > 1 else "local"
    if min(size, num_stages) < 1 or given["distributed_executor_backend"] == "local":
        return  # EngineConfig refuses what can't be
    from mini_infer.modeling.sharding import check_divides
    from mini_infer.modeling.weights import share_out_layers

    check_divides(model_config, size)
    if num_stages > 1:
        share_out_layers(model_config, num_stages)
    on_ray = given["distributed_executor_backend"] == "ray"
    if on_ray:
        _check_packages("ranks on Ray", PACKAGES | RAY_PACKAGES)
    else:
        _check_packages("ranks in processes of their own", PACKAGES)
    if given["device"] == "cuda" and not on_ray:  # which knows what its hosts have
        _check_gpus(size, num_stages)


def cluster_has_gpus(given: Mapping[str, Any]) -> bool:
    """Do the hosts have any that would run the steps, where these are not run here?

    Raises:
        InvalidConfigError: there is no cluster, or no package for it.
    """
    if given["distributed_executor_backend"] != "ray":
        return False
    _check_packages("ranks on Ray", PACKAGES | RAY_PACKAGES)
    from mini_infer.runtime.ray_cluster import has_gpus

    return has_gpus()


def _check_packages(what: str, packages: Mapping[str, str]) -> None:
    missing = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    if missing:
        raise InvalidConfigError(
            f"{what} need {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def _check_gpus(size: int, num_stages: int) -> None:
    import torch

    count = torch.cuda.device_count()
    asked = f"tensor_parallel_size {size} needs as many GPUs"
    if num_stages > 1:
        asked = (
            f"pipeline_parallel_size {num_stages} with tensor_parallel_size {size} needs "
            f"{num_stages * size} GPUs"
        )
    if count < size * num_stages:
        raise InvalidConfigError(
            f"{asked}, torch sees {count}: lower it, or show more GPUs (CUDA_VISIBLE_DEVICES)"
        )
