"""Drafts from a trained head, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.draft_inputs import draft_metadata
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.modeling.sampler import Sampler


class HeadProposer:
    """Drafts with ``head``, over the target ``model`` and its caches."""

    def __init__(
        self,
        head: DraftHead,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
    ) -> None:
        self._head = head
        self._model, self._state = model, state
        self._caches = caches[-len(head.layers) :]
        self._sampler = Sampler()
        self._draws = state.sampling.over(head.token_ids)
        self.drafts_at_once = head.later is not None
        """Do all drafts of a step go through the layers in one pass? Then each number of them may
        launch kernels of its own (``ProposeGraphs.rehearse``)."""

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        """See ``DeviceProposer.propose``."""
        if self.drafts_at_once:
            return self._propose_at_once(rows, num_drafts)
        model, head, state = self._model, self._head, self._state
        token_ids, positions, hidden = rows.token_ids, rows.positions, rows.hidden
        drafts = []
        for _ in range(num_drafts):
            _, meta = draft_metadata(state, rows.slots, positions)
            embedded = model.embed_tokens(token_ids)
            hidden = head(hidden, embedded, model.rotary(positions), self._caches, meta)
            positions = positions + 1
            token_ids = head.token_ids[self._draw(hidden, rows.slots, positions)]
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1)

    def _propose_at_once(self, rows: DraftRows, num_drafts: int) -> Tensor:
        model, head, state = self._model, self._head, self._state
        assert head.later is not None
        positions, meta = draft_metadata(state, rows.slots, rows.positions, num_drafts)
        embedded, rope = model.embed_tokens(rows.token_ids), model.rotary(positions)
        states = head(rows.hidden, embedded, rope, self._caches, meta, num_drafts)
        by_place = states.unflatten(0, (-1, num_drafts)).transpose(0, 1).contiguous()
        ends = (positions + 1).view(-1, num_drafts).T.contiguous()
        drawn: list[Tensor] = []
        for x, end in zip(by_place, ends, strict=True):
            state_here = head.later(x, drawn[-1]) if drawn else x
            drawn.append(self._draw(state_here, rows.slots, end))
        return head.token_ids[torch.stack(drawn, dim=1)]

    def _draw(self, x: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Which of the head's tokens ``[R]`` shall stand at ``positions``, drawn from the residual
        stream ``x [R, hidden]``."""
        logits = self._head.compute_logits(x)
        return self._sampler.draw_drafts(logits, slots, positions, self._draws)
