"""The target's own first layers draft (self-speculation: arXiv 2309.08168, 2404.16710).

They share weights and KV cache with it: what a draft's pass writes for them is what verification
writes again, so there is nothing to keep in step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.draft_inputs import draft_metadata
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.modeling.sampler import Sampler


class EarlyExitProposer:
    """Layers ``0..num_layers - 1``, then the target's norm and head."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
    ) -> None:
        assert config.speculative_config is not None
        num_layers = config.speculative_config.num_layers
        assert num_layers is not None, "the resolver chose"
        self._model, self._state = model, state
        self._caches = caches[:num_layers]
        self._sampler = Sampler()

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        """See ``DeviceProposer.propose``."""
        token_ids, positions = rows.token_ids, rows.positions
        drafts = []
        for _ in range(num_drafts):
            _, meta = draft_metadata(self._state, rows.slots, positions)
            x = self._model(token_ids, positions, self._caches, meta)
            logits = self._model.compute_logits(x)
            positions = positions + 1
            token_ids = self._sampler.draw_drafts(
                logits, rows.slots, positions, self._state.sampling
            )
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1)
