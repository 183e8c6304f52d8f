"""Decode steps as CUDA graphs: recorded once per batch size, replayed with one call.

A decode step of a small model is some two hundred kernels of a few microseconds. Launched one by
one from Python they take longer to launch than to run. A graph holds all of them with their
arguments, so everything that changes from step to step is read from device memory: the graph's
only inputs are each row's slot and position.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
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
from mini_infer.modeling.step_layout import StepLayout
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


def record(
    step: Callable[[], None], pool: "_POOL_HANDLE", *, is_rehearsed: bool = False
) -> torch.cuda.CUDAGraph:
    """The graph of what ``step`` launches; its results are in tensors that others hold.

    It runs once before, unless its very launches were rehearsed: what is not compiled yet is
    compiled then, and libraries open what they need, which a capture must not.
    """
    if not is_rehearsed:
        step()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph


class RowGraphs(ABC):
    """Graphs of a model, or of a stage of it, for steps of one token a request.

    Surplus rows own the null slot, whose context is one token of the null block.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        pool: "_POOL_HANDLE",
    ) -> None:
        self._config = config
        self._model = model
        self._caches = caches
        self._state = state
        max_rows = config.max_num_seqs
        device = state.device
        self.sizes = graph_sizes(max_rows)
        # Slots, starts, and whose turn it is among the results.
        self._inputs = torch.zeros(2 * max_rows + 1, dtype=torch.int64, device=device)
        self._cu_seqlens_q = torch.arange(max_rows + 1, device=device)
        self._turn = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = pool

    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Records the graphs, by default all. The largest comes first: the others reuse its memory.

        What runs before that does so on the null slot: the largest, and of several ranks all.
        """
        with torch.inference_mode():
            bar = tqdm(
                sorted(sizes or self.sizes, reverse=True),
                desc="CUDA graphs",
                disable=None,
                leave=False,
            )
            for size in bar:
                self._write(size, [], [])
                # Ranks exchange: a library may open another connection for each size of message.
                is_rehearsed = bool(self._graphs) and self._config.num_ranks == 1
                step = partial(self._step, size)
                self._graphs[size] = record(step, self._pool, is_rehearsed=is_rehearsed)

    def rehearse(self) -> None:
        """Launches the step of every size once, on the null slot, and records nothing."""
        with torch.inference_mode():
            for size in self.sizes:
                self._write(size, [], [])
                self._step(size)

    def _write(self, size: int, slots: list[int], starts: list[int]) -> None:
        """Uploads a step's inputs. Surplus rows are the null slot's."""
        packed = np.zeros(2 * size + 1, dtype=np.int64)
        row_slots, row_starts = packed[:-1].reshape(2, size)
        row_slots[: len(slots)], row_slots[len(slots) :] = slots, self._state.null_slot
        row_starts[: len(starts)] = starts
        packed[-1] = self._turn
        copy_to_device(packed, self._inputs[: len(packed)])

    def _views(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """``slots, starts [size]`` and ``turn [1]`` among the inputs."""
        slots, starts = self._inputs[: 2 * size].chunk(2)
        return slots, starts, self._inputs[2 * size : 2 * size + 1]

    def _step(self, num_rows: int) -> None:
        state, config = self._state, self._config
        slots, starts, turn = self._views(num_rows)
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
        self._finish(x, slots, starts, seqlens_k, turn)

    @abstractmethod
    def _finish(
        self, x: Tensor, slots: Tensor, starts: Tensor, seqlens_k: Tensor, turn: Tensor
    ) -> None:
        """Launches what a graph holds behind the layers, for their rows ``x [R, hidden]``."""


class DecodeGraphs(RowGraphs):
    """Graphs of model, head and sampler for steps of one token a request."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        logits: Tensor,
        pool: "_POOL_HANDLE",
    ) -> None:
        """``logits [max_num_seqs, vocab]`` is where the head leaves what is sampled from."""
        super().__init__(config, model, caches, state, pool)
        self._logits = logits
        # A step's tokens stay there until those of ``depth`` more steps came.
        shape, pinned = (config.depth + 1, config.max_num_seqs), state.device.type == "cuda"
        self._results = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._expected: tuple[list[int], list[int]] | None = None

    def run(self, layout: StepLayout) -> tuple[Tensor, Tensor]:
        """Replays a step of one token for each of R slots.

        Returns the sampled tokens ``[R]``, on the host once the device is there, and the logits
        ``[R, V]``, which the next step overwrites. The tokens stand in the token table, too.
        """
        num_rows = layout.num_rows
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        # Where Ctrl-C cuts a step short, nobody knows what the device has counted: say it again.
        expected, self._expected = self._expected, None
        if (layout.slots, layout.starts) != expected:
            self._write(size, layout.slots, layout.starts)
        self._graphs[size].replay()
        token_ids = self._results[self._turn]
        self._turn = (self._turn + 1) % len(self._results)
        self._expected = layout.slots, [start + 1 for start in layout.starts]
        return token_ids[:num_rows], self._logits[:num_rows]

    def for_nobody(self, starts: list[int]) -> Callable[[], None]:
        """Replays a step of surplus rows at ``starts``, to be timed; no step may come between two
        calls."""
        size = self.sizes[bisect_left(self.sizes, len(starts))]
        self._expected = None
        self._write(size, [self._state.null_slot] * len(starts), starts)
        return self._graphs[size].replay

    def _finish(
        self, x: Tensor, slots: Tensor, starts: Tensor, seqlens_k: Tensor, turn: Tensor
    ) -> None:
        state = self._state
        logits = self._model.compute_logits(x, out=self._logits[: len(x)])
        token_ids = draw(logits, slots, seqlens_k, state.sampling, state.token_table)
        ops.publish_(token_ids, slots, starts, state.null_slot, self._results, turn)
