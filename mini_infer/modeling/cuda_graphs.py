"""Decode steps as CUDA graphs: recorded once per batch size, replayed with one call.

A decode step of a small model is some two hundred kernels of a few microseconds. Launched one by
one from Python they take longer to launch than to run. A graph holds all of them with their
arguments, so everything that changes from step to step is read from device memory: the graph's
only inputs are each row's slot and position.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.sampler import draw
from mini_infer.modeling.step_layout import Integers
from mini_infer.modeling.upload import copy_to_device

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes that get a graph, ascending; a step takes the next larger one.

    Weights are read once whatever the batch, so a few padded rows cost little. From 64 on eight
    sizes lead to twice the batch: a graph takes time to record, and memory.
    """
    ladder = [1, 2, 4, *range(8, 64, 8)]
    octave = 64
    while octave < max_rows:
        ladder += range(octave, 2 * octave, octave // 8)
        octave *= 2
    return [size for size in ladder if size < max_rows] + [max_rows]


class DecodeGraphs:
    """Graphs of model, head and sampler for steps of one token a request.

    Surplus rows own the null slot, whose context is one token of the null block.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        dtype: torch.dtype,
        pool: "_POOL_HANDLE",
    ) -> None:
        self._config = config
        self._model = model
        self._caches = caches
        self._state = state
        max_rows = config.max_num_seqs
        device = state.device
        self.sizes = graph_sizes(max_rows)
        self._inputs = torch.zeros(2 * max_rows, dtype=torch.int64, device=device)
        self._cu_seqlens_q = torch.arange(max_rows + 1, device=device)
        self._logits = torch.empty(
            max_rows, config.model_config.vocab_size, dtype=dtype, device=device
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._token_ids: dict[int, Tensor] = {}
        self._pool = pool

    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Records the graphs, by default all. The largest comes first: the others reuse its memory.

        Their kernels run, on the null slot.
        """
        self._inputs[:] = 0
        with torch.inference_mode():
            bar = tqdm(
                sorted(sizes or self.sizes, reverse=True),
                desc="CUDA graphs",
                disable=None,
                leave=False,
            )
            for size in bar:
                self._prepare(size)
                self._step(size)  # compiles what is not compiled yet: a capture must not
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    self._token_ids[size] = self._step(size)
                self._graphs[size] = graph

    def rehearse(self) -> None:
        """Launches the step of every size once, on the null slot, and records nothing."""
        with torch.inference_mode():
            for size in self.sizes:
                self._prepare(size)
                self._step(size)

    def run(self, slots: Integers, starts: Integers) -> tuple[Tensor, Tensor]:
        """Replays a step of ``slots [R]`` at positions ``starts [R]``.

        Returns the sampled tokens ``[R]``, which stand in the token table already, and the logits
        ``[R, V]``. Both are overwritten by the next step.
        """
        num_rows = len(slots)
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        inputs = np.zeros(2 * size, dtype=np.int64)
        inputs[:num_rows] = slots
        inputs[num_rows:size] = self._state.null_slot
        inputs[size : size + num_rows] = starts
        copy_to_device(inputs, self._inputs[: 2 * size])
        self._graphs[size].replay()
        return self._token_ids[size][:num_rows], self._logits[:num_rows]

    def _prepare(self, size: int) -> None:
        self._inputs[:size] = self._state.null_slot
        self._inputs[size : 2 * size] = 0

    def _step(self, num_rows: int) -> Tensor:
        state, config = self._state, self._config
        slots, starts = self._inputs[: 2 * num_rows].chunk(2)
        token_ids, seqlens_k, slot_mapping, block_table = ops.decode_inputs(
            slots,
            starts,
            state.token_table,
            state.block_table,
            config.block_size,
            config.max_blocks_per_request,
        )
        meta = AttentionMetadata(
            cu_seqlens_q=self._cu_seqlens_q[: num_rows + 1],
            seqlens_k=seqlens_k,
            block_table=block_table,
            slot_mapping=slot_mapping,
            max_query_len=1,
            max_seqlen_k=config.max_model_len,
            query_lens=(1,) * num_rows,
            context_lens=(config.max_model_len,) * num_rows,
            backend=config.attention_backend,
        )
        x = self._model(token_ids, starts, self._caches, meta)
        logits = self._model.compute_logits(x, out=self._logits[:num_rows])
        return draw(logits, slots, seqlens_k, state.sampling, state.token_table)
