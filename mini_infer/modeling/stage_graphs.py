"""The CUDA graphs of a stage before the last: its layers, whose results are sent and not sampled.

What is received before them and sent behind them is outside of the graphs: those of two stages need
not be the same, nor does either stage have to replay one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.chunk_graphs import MAX_TOKENS, ChunkGraphs
from mini_infer.modeling.cuda_graphs import RowGraphs
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.step_layout import StepLayout


class StageRowGraphs(RowGraphs):
    """Graphs of a stage's layers for steps of one token a request."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        hidden: Tensor,
        pool: torch.cuda._POOL_HANDLE,
    ) -> None:
        """``hidden [max_num_seqs or more, hidden]`` is where graphs leave all rows."""
        super().__init__(config, model, caches, state, pool)
        self._hidden = hidden

    def run(self, layout: StepLayout) -> Tensor:
        """The residual stream ``[R, hidden]`` of R slots. The next step overwrites it."""
        count = layout.num_rows
        size = self.sizes[bisect_left(self.sizes, count)]
        self._write(size, layout.slots, layout.starts)
        self._graphs[size].replay()
        return self._hidden[:count]

    def _finish(
        self, x: Tensor, slots: Tensor, starts: Tensor, seqlens_k: Tensor, turn: Tensor
    ) -> None:
        self._hidden[: len(x)].copy_(x)


class StageChunkGraphs(ChunkGraphs):
    """Graphs of a stage's layers for steps with chunks of prompts: all their tokens go on."""

    def run(self, layout: StepLayout) -> Tensor | None:
        """The residual stream ``[T, hidden]``, or None where no graph would be faster. The next
        step overwrites it."""
        if super().run(layout) is None:
            return None
        return self._hidden[: layout.num_tokens]

    def _run_layers(self, token_ids: Tensor, positions: Tensor, meta: AttentionMetadata) -> None:
        hidden = self._model(token_ids, positions, self._caches, meta)
        self._hidden[: len(hidden)].copy_(hidden)


class StageGraphs(NamedTuple):
    """They run one at a time, so they share their memory. Implements ``GraphSet``."""

    rows: StageRowGraphs
    chunks: StageChunkGraphs

    @classmethod
    def over(
        cls,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        dtype: torch.dtype,
    ) -> StageGraphs:
        """Graphs over a stage and a cache that are there, not yet recorded."""
        pool = torch.cuda.graph_pool_handle()
        most = max(config.max_num_seqs, min(config.max_step_tokens, MAX_TOKENS))
        size = config.model_config.hidden_size
        hidden = torch.empty(most, size, dtype=dtype, device=state.device)
        target = config, model, caches, state, hidden, pool
        return cls(StageRowGraphs(*target), StageChunkGraphs(*target))

    def run(self, layout: StepLayout) -> Tensor | None:
        """See ``StageChunkGraphs.run``."""
        if layout.num_tokens == layout.num_rows:
            return self.rows.run(layout)
        return self.chunks.run(layout)

    def capture(self) -> None:
        """See ``GraphSet``."""
        self.rows.capture()
        self.chunks.capture()

    def capture_largest(self) -> None:
        """See ``GraphSet``."""
        for shape in self.chunks.shapes[-1:]:
            self.chunks.record(shape)
        self.rows.capture(self.rows.sizes[-1:])

    def further(self) -> list[tuple[Callable[[], None], int]]:
        """See ``GraphSet``."""
        kinds = self.rows.sizes, self.chunks.shapes
        count = sum(max(0, len(kind) - 1) for kind in kinds)
        return [(partial(self.rows.capture, self.rows.sizes[-2:-1]), count)]

    def rehearse(self) -> None:
        """See ``GraphSet``."""
        self.rows.rehearse()
        self.chunks.rehearse()
