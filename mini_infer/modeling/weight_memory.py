"""What a model's weights take, and whether that is there: asked before the first byte is loaded."""

import psutil
import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels.cpu_linear import packed_bytes
from mini_infer.modeling.layers import Linear
from mini_infer.modeling.stage import Stage
from mini_infer.modeling.weights import empty_model

GIB = 2**30
HALF_DTYPES = {"cpu": ("float16",), "cuda": ("bfloat16", "float16")}
"""What a GPU or a CPU computes with at half the memory of float32."""


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, device: str, stage: Stage | None = None
) -> int:
    """Bytes of a loaded model's weights, or of what a ``stage`` has of them: on a CPU, of the
    layouts that they are packed into.

    A tied table that is packed for the head is there twice.
    """
    model = empty_model(config, dtype, "meta", 1, stage)
    has_table = model.stage.has_table(config.tie_word_embeddings)
    table = model.embed_tokens.weight if has_table else None
    nbytes = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    for layer in model.modules() if device == "cpu" else ():
        if isinstance(layer, Linear):
            out_features, in_features = layer.weight.shape
            packed = packed_bytes(out_features, in_features, dtype)
            if packed is not None:
                nbytes[id(layer if layer.weight is table else layer.weight)] = packed
    return sum(nbytes.values())


def check_memory(
    config: EngineConfig, part: ModelConfig | None = None, stage: Stage | None = None
) -> None:
    """Linux kills a process that takes too much memory; an error that says so is kinder.

    ``part`` is what this device will hold of a model that is spread over several; of that, what
    this ``stage`` has.

    Raises:
        OutOfMemoryError: the weights exceed the free memory; the message says what would fit.
    """
    model = part or config.model_config
    needed, free = _needed(config, model, config.dtype, stage), _free(config.device)
    if needed > free:
        place = "" if config.device == "cpu" else f" on {torch.cuda.get_device_name()}"
        raise OutOfMemoryError(
            f"the weights of {config.model} need {needed / GIB:.1f} GiB in {config.dtype}, "
            f"{free / GIB:.1f} GiB are free{place}: {_what_fits(config, model, free, stage)}"
        )


def _needed(config: EngineConfig, model: ModelConfig, dtype: str, stage: Stage | None) -> int:
    return weight_bytes(model, getattr(torch, dtype), config.device, stage)


def _free(device: str) -> int:
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _what_fits(config: EngineConfig, model: ModelConfig, free: int, stage: Stage | None) -> str:
    for dtype in HALF_DTYPES[config.device] if config.dtype == "float32" else ():
        if (needed := _needed(config, model, dtype, stage)) <= free:
            return f"dtype {dtype} would fit with {needed / GIB:.1f} GiB"
    return f"at most {free / 2 / 1e9:.1f} billion parameters of two bytes fit: use a smaller model"
