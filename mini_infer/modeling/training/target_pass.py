"""What a target leaves behind along whole texts: a draft head's inputs, and what it should predict.

Letters in shapes: B texts, L tokens of the longest one, Hkv key-value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer.core.engine_config import AttentionBackend, EngineConfig
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.load import open_source
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.weight_memory import check_memory
from mini_infer.modeling.weights import empty_model, load_weights

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class TargetTexts:
    """B texts, each padded behind its end."""

    token_ids: Tensor
    """``[B, L]`` int64"""
    wanted: Tensor
    """``[B, L]`` bool: tokens that a draft should have predicted."""
    hidden: Tensor
    """``[B, L, hidden]``: the residual stream after the last layer."""
    keys: list[Tensor]
    """``[B, L, Hkv, D]`` of each of the last layers: what it wrote to its cache."""
    values: list[Tensor]


def load_plain_target(config: EngineConfig, files: ModelFiles) -> CausalLM:
    """The model as a checkpoint has it: no weight is packed, so that gradients pass.

    Raises:
        OutOfMemoryError, WeightsError: see ``load_model``.
    """
    check_memory(config)
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = empty_model(config.model_config, dtype, config.device, config.max_model_len)
    for _ in load_weights(model, open_source(config, files, dtype)):
        pass
    return model


class TargetPass:
    """Runs a model over texts and reads what its last ``num_layers`` layers left in the KV cache.

    The layers below share one cache: each writes a text whole before it attends, and nobody asks
    for the keys of the layer before.
    """

    def __init__(self, model: CausalLM, num_layers: int, backend: AttentionBackend) -> None:
        self._model, self._num_layers, self._backend = model, num_layers, backend

    @torch.no_grad()
    def __call__(
        self, token_ids: Tensor, wanted: Tensor, tap: list[Tensor] | None = None
    ) -> TargetTexts:
        """``token_ids [B, L]`` int64 and ``wanted [B, L]`` bool, on the model's device.

        The input ``[B, L, hidden]`` of the last ``num_layers`` layers is appended to ``tap``, if
        given.
        """
        model, (num_texts, length) = self._model, token_ids.shape
        device, num_below = token_ids.device, len(model.layers) - self._num_layers
        blocks = -(-length // BLOCK_SIZE)
        positions = torch.arange(length, device=device).repeat(num_texts)
        first_slots = torch.arange(num_texts, device=device) * (blocks * BLOCK_SIZE)
        block_ids = torch.arange(num_texts * blocks, device=device, dtype=torch.int32)
        meta = AttentionMetadata(
            cu_seqlens_q=torch.arange(num_texts + 1, device=device, dtype=torch.int32) * length,
            seqlens_k=torch.full((num_texts,), length, device=device, dtype=torch.int32),
            block_table=block_ids.view(num_texts, blocks),
            slot_mapping=first_slots.repeat_interleave(length) + positions,
            max_query_len=length,
            max_seqlen_k=length,
            query_lens=(length,) * num_texts,
            context_lens=(length,) * num_texts,
            backend=self._backend,
        )
        x = model.embed_tokens(token_ids.flatten())
        layout = model.kv_layout
        shape = num_texts * blocks, BLOCK_SIZE, layout.num_kv_heads, layout.head_dim

        def new_cache() -> KVCache:
            return x.new_zeros(shape), x.new_zeros(shape)

        def per_text(plane: Tensor) -> Tensor:
            return plane.reshape(num_texts, blocks * BLOCK_SIZE, *shape[2:])[:, :length]

        rope, below, own = model.rotary(positions), new_cache(), []
        for depth, layer in enumerate(model.layers):
            if depth == num_below and tap is not None:
                tap.append(x.view(num_texts, length, -1).clone())
            cache = below if depth < num_below else new_cache()
            x = layer(x, rope, cache, meta)
            if depth >= num_below:
                own.append(cache)
        keys, values = ([per_text(planes[which]) for planes in own] for which in (0, 1))
        return TargetTexts(token_ids, wanted, x.view(num_texts, length, -1), keys, values)


def pad(texts: Sequence[Sequence[int]], device: torch.device, length: int) -> Tensor:
    """Texts of different lengths as ``[B, length]`` int64, zeros behind their ends."""
    rows = [[*text, *(0,) * (length - len(text))] for text in texts]
    return torch.tensor(rows, dtype=torch.int64).to(device)
