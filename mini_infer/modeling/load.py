"""From model files to a model on its device."""

import math

import psutil
import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.dummy_source import DummySource
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.safetensors_source import SafetensorsSource
from mini_infer.modeling.weights import WeightSource, build_model, checkpoint_shapes


def load_model(config: EngineConfig, files: ModelFiles) -> CausalLM:
    """Builds the architecture and streams its weights in, in ``config.dtype``.

    Raises:
        OutOfMemoryError: the weights alone exceed the free memory.
        WeightsError: the checkpoint does not fit the architecture.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    _check_memory(config, dtype)
    return build_model(
        config.model_config,
        _open_source(config, files, dtype),
        dtype,
        config.device,
        config.max_model_len,
    )


def _open_source(config: EngineConfig, files: ModelFiles, dtype: torch.dtype) -> WeightSource:
    if config.load_format == "dummy":
        return DummySource(config.model_config, config.seed, dtype, config.device)
    if config.load_format == "gguf":
        from mini_infer.modeling.gguf_source import GGUFSource  # the gguf package, for its readers

        return GGUFSource(files.weights)
    return SafetensorsSource(files.weights)


def _check_memory(config: EngineConfig, dtype: torch.dtype) -> None:
    """Linux kills a process that takes too much memory; an error that says so is kinder."""
    shapes = checkpoint_shapes(config.model_config)
    needed = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    if config.device == "cpu":
        free = psutil.virtual_memory().available
    else:
        free, _ = torch.cuda.mem_get_info()
    if needed > free:
        raise OutOfMemoryError(
            f"the weights of {config.model} need {needed / 2**30:.1f} GiB in {config.dtype}, "
            f"{free / 2**30:.1f} GiB are free: use a smaller model or dtype"
        )
