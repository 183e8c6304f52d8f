"""Drafts from a trained head, on the device."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.head_files import load_draft_head
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.modeling.sampler import Sampler


class HeadProposer:
    """Drafts with the head in the folder ``config.speculative_config.model``."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
    ) -> None:
        """Raises what ``load_draft_head`` does."""
        speculation = config.speculative_config
        assert speculation is not None
        assert speculation.model is not None, "the resolver asks for it"
        folder = Path(speculation.model).expanduser()
        dtype: torch.dtype = getattr(torch, config.dtype)
        self._head = load_draft_head(folder, model, dtype)
        self._model, self._cache, self._state = model, caches[-1], state
        self._sampler = Sampler()

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        """See ``DeviceProposer.propose``."""
        state, head = self._state, self._head
        token_ids, hidden = rows.token_ids, rows.hidden
        meta = self._context(rows)
        # [num_drafts + 1, R]: where the tokens to start from stand, and behind them the drafts. A
        # request may end before its drafts do; none is at a position that the model has not.
        steps = torch.arange(num_drafts + 1, device=token_ids.device)
        positions = (rows.positions + steps[:, None]).clamp_max_(state.token_table.shape[1] - 1)
        drafts = []
        for step in range(num_drafts):
            rope = self._model.rotary(positions[step])
            embedded = self._model.embed_tokens(token_ids)
            hidden = head(hidden, embedded, rope, self._cache, meta)
            logits = self._spread(head.compute_logits(hidden))
            token_ids = self._sampler.draw_drafts(
                logits, rows.slots, positions[step + 1], state.sampling
            )
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1)

    def _context(self, rows: DraftRows) -> AttentionMetadata:
        """One query a row, over the tokens before its last: those have keys, however many drafts
        there will be."""
        state, num_rows = self._state, len(rows.slots)
        seqlens_k = rows.positions.clamp_min(1)  # a graph's surplus rows have none
        limit = state.token_table.shape[1]
        contexts = tuple(seqlens_k.tolist()) if seqlens_k.is_cpu else (limit,) * num_rows
        return AttentionMetadata(
            cu_seqlens_q=torch.arange(num_rows + 1, device=seqlens_k.device),
            seqlens_k=seqlens_k,
            block_table=state.block_table[rows.slots],
            slot_mapping=seqlens_k,  # nothing is written
            max_query_len=1,
            max_seqlen_k=max(contexts),
            query_lens=(1,) * num_rows,
            context_lens=contexts,
            backend=state.attention_backend,
        )

    def _spread(self, logits: Tensor) -> Tensor:
        """``logits [R, Vd]`` in their places among the whole vocabulary's ``[R, V]``."""
        token_ids, vocab_size = self._head.token_ids, self._state.sampling.vocab_size
        if len(token_ids) == vocab_size:
            return logits
        spread = logits.new_full((len(logits), vocab_size), float("-inf"))
        return spread.index_copy_(1, token_ids, logits)
