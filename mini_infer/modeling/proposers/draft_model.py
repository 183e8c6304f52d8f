"""A smaller model of the same vocabulary as the draft model (arXiv 2211.17192, 2302.01318).

Its keys and values live in storage of its own, but in the blocks of the target's block table: a
token has the same place in both. What stands there for a rejected draft is overwritten before it is
read, as it is in the target's.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.kv_memory import allocate_kv_cache
from mini_infer.modeling.layers import activation_dtype
from mini_infer.modeling.load import load_model
from mini_infer.modeling.model_files import locate_model
from mini_infer.modeling.proposers.draft_inputs import draft_metadata
from mini_infer.modeling.proposers.draft_progress import DraftProgress
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.modeling.sampler import Sampler
from mini_infer.modeling.step_layout import StepLayout

CATCH_UP_TOKENS = 1024
"""A step computes as many missed tokens, where it may have less: a probe of drafts that were off
for a while has to see more than the few tokens of a CPU's chunk."""


def load_draft_model(config: EngineConfig) -> CausalLM:
    """The draft model of ``config.speculative_config``, with its weights on the device.

    Raises:
        ModelNotFoundError: it is not where it was.
        OutOfMemoryError: its weights exceed the memory that the target left.
        WeightsError: its checkpoint does not fit its architecture.
    """
    draft = _engine_config(config)
    files = locate_model(draft.model)
    if draft.load_format != "dummy":
        is_gguf = files.weights.suffix == ".gguf"
        draft = replace(draft, load_format="gguf" if is_gguf else "safetensors")
    return load_model(draft, files)


class DraftModelProposer:
    """Drafts with the draft model, as its requests ask to be sampled."""

    def __init__(
        self, config: EngineConfig, model: CausalLM, num_blocks: int, state: DeviceState
    ) -> None:
        """Makes room for the keys and values of ``model`` in ``num_blocks`` blocks, as many as the
        target's cache has, the null block included.

        Raises:
            OutOfMemoryError: they do not fit the memory.
        """
        assert config.speculative_config is not None
        self._model, self._state, self._sampler = model, state, Sampler()
        dtype = activation_dtype(model.embed_tokens.weight)
        self._caches = allocate_kv_cache(_engine_config(config), model.kv_layout, num_blocks, dtype)
        most_in_flight = (config.depth - 1) * config.speculative_config.num_speculative_tokens
        most_at_once = max(config.max_step_tokens, CATCH_UP_TOKENS)
        self._progress = DraftProgress(num_blocks, config.block_size, most_in_flight, most_at_once)
        self._target_vocab_size = config.model_config.vocab_size

    def follow(self, batch: ScheduledBatch) -> None:
        """Computes what the draft model has missed of the requests that will draft, if anything.
        See ``FollowingProposer``."""
        gaps = self._progress.follow(batch)
        if not gaps:
            return
        first_rows = [0]
        for gap in gaps:
            first_rows.append(first_rows[-1] + gap.length)
        layout = StepLayout(
            slots=[gap.slot for gap in gaps],
            starts=[gap.start for gap in gaps],
            query_lens=[gap.length for gap in gaps],
            first_rows=first_rows,
            sampled=[],
        )
        inputs = self._state.lay_out(layout)
        self._forward(inputs.token_ids, inputs.positions, inputs.meta)

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        """See ``DeviceProposer.propose``.

        The first pass takes a request's last two tokens: where all drafts were accepted, the last
        of them has never been an input.
        """
        state, slots, last = self._state, rows.slots, rows.positions
        first = (last - 1).clamp_min_(0)
        positions, meta = draft_metadata(state, slots, first, num_tokens=2)
        before = state.token_table[slots, positions[::2]].to(rows.token_ids.dtype)
        token_ids = torch.stack((before, rows.token_ids), dim=1).flatten()
        drafts: list[Tensor] = []
        while True:
            logits = self._logits(self._forward(token_ids, positions, meta))
            last = last + 1
            token_ids = self._sampler.draw_drafts(logits, slots, last, state.sampling)
            drafts.append(token_ids)
            if len(drafts) == num_drafts:
                return torch.stack(drafts, dim=1)
            positions, meta = draft_metadata(state, slots, last)

    def _forward(self, token_ids: Tensor, positions: Tensor, meta: AttentionMetadata) -> Tensor:
        """The residual stream ``[R, hidden]`` of each row's last token."""
        if self._model.config.vocab_size < self._target_vocab_size:  # it has tokens of its own
            token_ids = token_ids.clamp_max(self._model.config.vocab_size - 1)
        wanted = meta.last_tokens() if meta.max_query_len > 1 else None
        hidden: Tensor = self._model(token_ids, positions, self._caches, meta, wanted)
        return hidden

    def _logits(self, x: Tensor) -> Tensor:
        """``[R, V]`` over the target's vocabulary: tables of one may be padded to different sizes,
        and a token that only one model has is no draft."""
        logits = self._model.compute_logits(x)
        surplus = logits.shape[-1] - self._target_vocab_size
        if surplus > 0:
            return logits[:, : self._target_vocab_size]
        return pad(logits, (0, -surplus), value=float("-inf")) if surplus else logits


def _engine_config(config: EngineConfig) -> EngineConfig:
    """The draft model's, as if it were an engine's only one."""
    speculation = config.speculative_config
    assert speculation is not None
    assert speculation.model is not None, "the resolver asked for it"
    assert speculation.model_config is not None, "the resolver found it"
    return replace(
        config,
        model=speculation.model,
        model_config=speculation.model_config,
        max_model_len=config.max_model_len + config.max_drafts_ahead,
        enable_chunked_prefill=True,  # its steps are cut anyway
        speculative_config=None,
    )
