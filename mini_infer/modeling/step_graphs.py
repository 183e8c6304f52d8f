"""The CUDA graphs of a runner: decodes, the layers of steps with chunks, and those steps' ends."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.chunk_graphs import ChunkGraphs
from mini_infer.modeling.cuda_graphs import DecodeGraphs
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.sampling_graphs import SamplingGraphs


class StepGraphs(NamedTuple):
    """They run one at a time, so they share their memory: what one leaves, the next overwrites."""

    decodes: DecodeGraphs
    chunks: ChunkGraphs
    ends: SamplingGraphs

    @classmethod
    def over(
        cls,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        dtype: torch.dtype,
    ) -> "StepGraphs":
        """Graphs over a model and a cache that are there, not yet recorded."""
        sizes, rows, device = config.model_config, config.max_num_seqs, state.device
        pool = torch.cuda.graph_pool_handle()
        hidden = torch.empty(rows + 1, sizes.hidden_size, dtype=dtype, device=device)
        logits = torch.empty(rows, sizes.vocab_size, dtype=dtype, device=device)
        return cls(
            DecodeGraphs(config, model, caches, state, logits, pool),
            ChunkGraphs(config, model, caches, state, hidden, pool),
            SamplingGraphs(config, model, state, hidden, logits, pool),
        )

    def capture(self) -> None:
        """Records all of them."""
        for graphs in self:
            graphs.capture()

    def capture_largest(self, num_decodes: int) -> None:
        """Records the largest of each kind, and so many of the decodes."""
        self.decodes.capture(self.decodes.sizes[-num_decodes:])
        for shape in self.chunks.shapes[-1:]:
            self.chunks.record(shape)
        self.ends.capture(self.ends.sizes[-1:])

    @property
    def num_graphs(self) -> int:
        return len(self.decodes.sizes) + len(self.chunks.shapes) + len(self.ends.sizes)

    def rehearse(self) -> None:
        """Launches what their steps launch, and records nothing."""
        for graphs in self:
            graphs.rehearse()
