"""The CUDA graphs of a runner: decodes, the layers of steps with chunks, those steps' ends, and
steps with drafts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.chunk_graphs import ChunkGraphs
from mini_infer.modeling.cuda_graphs import DecodeGraphs
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.proposer import DeviceProposer
from mini_infer.modeling.sampling_graphs import SamplingGraphs
from mini_infer.modeling.speculative_graphs import (
    ProposeGraphs,
    SampledPlaces,
    VerifyGraphs,
    most_samples,
)


class GraphSet(Protocol):
    """All graphs of a runner, over a model and a cache that are there."""

    def capture(self) -> None:
        """Records all of them."""

    def capture_largest(self) -> None:
        """Records the largest of each kind."""

    def further(self) -> list[tuple[Callable[[], None], int]]:
        """What records one more graph after those, and how many there are like it."""
        ...

    def rehearse(self) -> None:
        """Launches what their steps launch, and records nothing."""


class StepGraphs(NamedTuple):
    """They run one at a time, so they share their memory: what one leaves, the next overwrites."""

    decodes: DecodeGraphs
    chunks: ChunkGraphs
    ends: SamplingGraphs
    verifications: VerifyGraphs
    proposals: ProposeGraphs

    @classmethod
    def over(
        cls,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        dtype: torch.dtype,
        proposer: DeviceProposer | None = None,
    ) -> "StepGraphs":
        """Graphs over a model and a cache that are there, not yet recorded.

        ``proposer`` is what proposes drafts on the device, if anything does.
        """
        sizes, rows, device = config.model_config, config.max_num_seqs, state.device
        pool = torch.cuda.graph_pool_handle()
        hidden = torch.empty(rows + 1, sizes.hidden_size, dtype=dtype, device=device)
        most_rows = max(rows, most_samples(config))
        logits = torch.empty(most_rows, sizes.vocab_size, dtype=dtype, device=device)
        sampled = SampledPlaces.empty(config, dtype, device)
        return cls(
            DecodeGraphs(config, model, caches, state, logits, pool),
            ChunkGraphs(config, model, caches, state, hidden, pool),
            SamplingGraphs(config, model, state, hidden, logits, pool),
            VerifyGraphs(config, model, caches, state, logits, sampled, pool),
            ProposeGraphs(config, state, proposer, sampled, pool),
        )

    def capture(self) -> None:
        """Records all of them."""
        for graphs in self:
            graphs.capture()

    def capture_largest(self) -> None:
        """Records the largest of each kind."""
        for shape in self.chunks.shapes[-1:]:
            self.chunks.record(shape)
        for graphs in (self.decodes, self.ends):
            graphs.capture(graphs.sizes[-1:])
        for shaped in (self.verifications, self.proposals):
            shaped.capture(shaped.shapes[-1:])

    def further(self) -> list[tuple[Callable[[], None], int]]:
        """What records one more graph after those, and how many there are like it."""
        kinds = self.decodes.sizes, self.chunks.shapes, self.ends.sizes
        count = sum(max(0, len(kind) - 1) for kind in kinds)
        decode: Callable[[], None] = partial(self.decodes.capture, self.decodes.sizes[-2:-1])
        more = [(decode, count)]
        for shaped in (self.verifications, self.proposals):
            shapes = shaped.shapes[-2:-1]
            more.append((partial(shaped.capture, shapes), max(0, len(shaped.shapes) - 1)))
        return more

    def rehearse(self) -> None:
        """Launches what their steps launch, and records nothing."""
        for graphs in self:
            graphs.rehearse()
