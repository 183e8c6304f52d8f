"""How many KV blocks fit, and their memory."""

import psutil
import torch
from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.core.kv_layout import KVLayout


def bytes_per_block(
    config: EngineConfig, layout: KVLayout, dtype: torch.dtype, num_layers: int | None = None
) -> int:
    """Bytes of one block over all layers, or the ``num_layers`` of a stage, those of a draft model
    with its own KV included."""
    size = (num_layers or config.model_config.num_layers) * layout.bytes_per_token(dtype.itemsize)
    speculation = config.speculative_config
    draft = speculation.model_config if speculation is not None else None
    if draft is not None:
        size += draft.num_layers * draft.kv_layout.bytes_per_token(dtype.itemsize)
    return config.block_size * size


def num_blocks_that_fit(
    config: EngineConfig, layout: KVLayout, dtype: torch.dtype, num_layers: int | None = None
) -> int:
    """Blocks in ``kv_cache_memory``, or ``num_kv_blocks`` where that is given. A GPU has those of
    its stage's ``num_layers``.

    Raises:
        OutOfMemoryError: not even one block fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    assert config.kv_cache_memory is not None, "without either, a GPU is profiled"
    if config.device == "cpu":  # whose memory the ranks share
        size = config.tensor_parallel_size * bytes_per_block(config, layout, dtype)
    else:
        size = bytes_per_block(config, layout, dtype, num_layers)
    count = config.kv_cache_memory // size
    if count < 1:
        raise OutOfMemoryError(
            f"kv_cache_memory of {config.kv_cache_memory} bytes holds no KV block: one takes "
            f"{size} bytes; raise kv_cache_memory or lower block_size"
        )
    return count


def allocate_kv_cache(
    config: EngineConfig,
    layout: KVLayout,
    num_blocks: int,
    dtype: torch.dtype,
    num_layers: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Per layer, or for the ``num_layers`` of a stage, a K and a V cache
    ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    Raises:
        OutOfMemoryError: more than the free memory, or the allocation failed.
    """
    num_layers = num_layers or config.model_config.num_layers
    size = num_blocks * bytes_per_block(config, layout, dtype, num_layers)
    # A CPU's allocator promises what it does not have, and the system kills who touches it.
    if config.device == "cpu" and size > (free := psutil.virtual_memory().available):
        raise OutOfMemoryError(
            f"the KV cache of {num_blocks} blocks needs {size / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free: lower kv_cache_memory or num_kv_blocks"
        )
    heads, tokens = layout.num_kv_heads, config.block_size
    # Zeros, not empty: a masked score times an uninitialised NaN would still be NaN.
    try:
        if config.device == "cpu":
            # A token's keys and values lie side by side, so that one gather can read both.
            shape: tuple[int, ...] = num_blocks, tokens, 2 * heads, layout.head_dim
            pairs = [_zeros(shape, dtype, config) for _ in range(num_layers)]
            return [(pair[:, :, :heads], pair[:, :, heads:]) for pair in pairs]
        # One program reads one head: its keys of a block are one piece of memory.
        shape = num_blocks, 2, heads, tokens, layout.head_dim
        pairs = [_zeros(shape, dtype, config) for _ in range(num_layers)]
        return [(pair[:, 0].transpose(1, 2), pair[:, 1].transpose(1, 2)) for pair in pairs]
    except RuntimeError as error:
        raise OutOfMemoryError(
            f"the KV cache of {size} bytes could not be allocated: lower kv_cache_memory"
        ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, config: EngineConfig) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=config.device)
