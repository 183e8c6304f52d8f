"""The end of a step with chunks as CUDA graphs: head and sampler of the rows that are sampled.

Behind the layers of a short chunk, launching these few kernels from Python would take the host
longer than a small model takes the device for the whole step.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.cuda_graphs import record
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.sampler import draw
from mini_infer.modeling.step_layout import Integers, StepLayout
from mini_infer.modeling.upload import copy_to_device

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 and so on below ``most``, then that."""
    return [1 << exponent for exponent in range((most - 1).bit_length())] + [most]


class SamplingGraphs:
    """A graph per power of two of sampled rows. Surplus rows own the null slot.

    Args:
        hidden: ``[max_num_seqs + 1, hidden]``, where ``ChunkGraphs`` leave each chunk's last token.
        logits: ``[max_num_seqs, vocab]``, where the head leaves what is sampled from.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        state: DeviceState,
        hidden: Tensor,
        logits: Tensor,
        pool: "_POOL_HANDLE",
    ) -> None:
        self._model, self._state, self._pool = model, state, pool
        self._hidden, self._logits = hidden, logits
        self.sizes = powers_of_two(config.max_num_seqs)
        self._inputs = torch.zeros(3 * self.sizes[-1], dtype=torch.int64, device=state.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._token_ids = torch.zeros(self.sizes[-1], dtype=torch.int64, device=state.device)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Records the graphs, by default all, the largest first. Their kernels run, on the null
        slot."""
        for size in reversed(sizes or self.sizes):
            self._write(size, (), (), ())
            self._graphs[size] = record(partial(self._step, size), self._pool)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launches what there is of every size once, on the null slot, and records nothing."""
        for size in self.sizes:
            self._write(size, (), (), ())
            self._step(size)

    def run(self, x: Tensor, layout: StepLayout) -> tuple[Tensor, Tensor]:
        """Samples those of each chunk's last token ``x [R, hidden]`` that ``layout`` says.

        Returns their tokens ``[S]``, which stand in the token table already, and logits ``[S, V]``.
        Both are overwritten by the next step.
        """
        if x.data_ptr() != self._hidden.data_ptr():  # its layers were launched
            self._hidden[: len(x)].copy_(x)
        count = len(layout.sampled)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._write(size, layout.sampled, layout.sampling_slots, layout.sampling_positions)
        self._graphs[size].replay()
        return self._token_ids[:count], self._logits[:count]

    def _write(self, size: int, *columns: Sequence[int] | Integers) -> None:
        """Rows of ``hidden``, their slots, and the positions of what is sampled."""
        inputs = np.zeros((3, size), dtype=np.int64)
        inputs[1] = self._state.null_slot
        for row, column in zip(inputs, columns, strict=True):
            row[: len(column)] = column
        copy_to_device(inputs.reshape(-1), self._inputs[: 3 * size])

    def _step(self, size: int) -> None:
        state = self._state
        rows, slots, positions = self._inputs[: 3 * size].view(3, size)
        x = self._hidden.index_select(0, rows)
        logits = self._model.compute_logits(x, out=self._logits[:size])
        token_ids = draw(logits, slots, positions, state.sampling, state.token_table)
        self._token_ids[:size].copy_(token_ids)
