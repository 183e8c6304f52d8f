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
        self.drafts_at_once = head.later is not None
        """Are all drafts of a step made in one pass?"""

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
            logits = self._spread(head.compute_logits(hidden))
            positions = positions + 1
            token_ids = self._sampler.draw_drafts(logits, rows.slots, positions, state.sampling)
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1)

    def _propose_at_once(self, rows: DraftRows, num_drafts: int) -> Tensor:
        model, state = self._model, self._state
        last = rows.positions + (num_drafts - 1)
        positions, meta = draft_metadata(state, rows.slots, last, num_drafts)
        embedded, rope = model.embed_tokens(rows.token_ids), model.rotary(positions)
        x = self._head(rows.hidden, embedded, rope, self._caches, meta, num_drafts)
        logits = self._spread(self._head.compute_logits(x))
        slots = rows.slots.repeat_interleave(num_drafts)
        drafts = self._sampler.draw_drafts(logits, slots, positions + 1, state.sampling)
        return drafts.view(-1, num_drafts)

    def _spread(self, logits: Tensor) -> Tensor:
        """``logits [R, Vd]`` in their places among the whole vocabulary's ``[R, V]``."""
        token_ids, vocab_size = self._head.token_ids, self._state.sampling.vocab_size
        if len(token_ids) == vocab_size:
            return logits
        spread = logits.new_full((len(logits), vocab_size), float("-inf"))
        return spread.index_copy_(1, token_ids, logits)
