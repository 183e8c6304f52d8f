"""From model files to a model on its device."""

import ctypes
import logging
import time

import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels import ops
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.dummy_source import DummySource
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.safetensors_source import SafetensorsSource
from mini_infer.modeling.sharding import Shard, build_shard
from mini_infer.modeling.stage import Stage
from mini_infer.modeling.weight_memory import check_memory
from mini_infer.modeling.weights import WeightSource, build_model
from mini_infer.parallel.group import SINGLE, TensorParallelGroup

logger = logging.getLogger(__name__)


def load_model(
    config: EngineConfig,
    files: ModelFiles,
    group: TensorParallelGroup = SINGLE,
    stage: Stage | None = None,
) -> CausalLM:
    """Builds the architecture, or the part of it that this rank of ``group`` has, or of its
    ``stage``, and streams its weights in, in ``config.dtype``.

    Raises:
        OutOfMemoryError: the weights alone exceed the free memory.
        WeightsError: the checkpoint does not fit the architecture.
    """
    begin = time.perf_counter()
    shard = Shard(config.model_config, group.rank, group.size)
    if config.num_ranks == 1 or config.device == "cuda":
        # A CPU's ranks share its memory: see who starts them.
        check_memory(config, shard.config, stage)
    dtype: torch.dtype = getattr(torch, config.dtype)
    source = open_source(config, files, dtype)
    target = dtype, config.device, config.max_model_len + config.max_drafts_ahead
    if group.size > 1 and config.custom_all_reduce and ops.gpu_kernels() is not None:
        group.open_mailboxes(config.model_config.hidden_size, dtype, config.max_step_tokens)
    if group.size > 1 or stage is not None:
        model = build_shard(shard, group, source, *target, stage)
    else:
        model = build_model(config.model_config, source, *target)
    if config.device == "cuda":
        torch.cuda.synchronize()  # a GPU draws random weights after it was told to
    else:
        _return_free_memory()
    logger.info("weights are on %s after %.1f s", config.device, time.perf_counter() - begin)
    return model


def _return_free_memory() -> None:
    """glibc keeps what packing borrowed: a tenth of the weights, more or less by chance."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def open_source(config: EngineConfig, files: ModelFiles, dtype: torch.dtype) -> WeightSource:
    """The weights of ``files``, or random ones where ``load_format`` is dummy."""
    if config.load_format == "dummy":
        return DummySource(config.model_config, config.seed, dtype, config.device)
    if config.load_format == "gguf":
        from mini_infer.modeling.gguf_source import GGUFSource  # the gguf package, for its readers

        return GGUFSource(files.weights)
    return SafetensorsSource(files.weights)
