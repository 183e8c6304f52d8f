"""Steps with drafts, behind the model's layers: sample, accept, propose.

Each row of a chunk samples at its own place, as it would alone; the drafts before it are its past.
A draft that the sampler itself arrives at is accepted, so what comes out is what plain decoding
samples, whoever proposed (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels import ops
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.proposer import DeviceProposer, DraftRows
from mini_infer.modeling.sampler import Sampler, SampleResult, UncertainRows
from mini_infer.modeling.step_layout import StepLayout
from mini_infer.modeling.step_result import LocalStep, PromptRows, VerifiedRows
from mini_infer.modeling.upload import to_device

if TYPE_CHECKING:
    from mini_infer.modeling.speculative_graphs import ProposeGraphs


@dataclass(frozen=True, slots=True)
class StepRows:
    """S rows of logits of a step that speculates, each with its place in its request.

    Attributes:
        hidden: ``[S, hidden]``, the residual stream.
        logits: ``[S, vocab]``.
        places: ``[S]`` int64 on the device: where what is sampled will stand.
        first: ``[R]``: where the rows of each sampled chunk begin. There are more of them than it
            has samples where a graph padded its drafts.
        drawn: ``[S]`` int64, what a graph sampled, if one did.
    """

    hidden: Tensor
    logits: Tensor
    places: Tensor
    first: list[int]
    drawn: Tensor | None = None

    def to_sample(self, layout: StepLayout) -> StepRows:
        """Only the rows that ``layout`` samples, and nothing drawn of them yet."""
        first = first_samples(layout)
        if len(self.places) == len(first) + sum(layout.num_drafts):
            return replace(self, drawn=None)
        counts = zip(self.first, layout.num_drafts, strict=True)
        rows = [row + offset for row, count in counts for offset in range(1 + count)]
        which = to_device(np.array(rows, dtype=np.int64), self.places.device)
        return StepRows(
            self.hidden.index_select(0, which),
            self.logits.index_select(0, which),
            self.places.index_select(0, which),
            first,
        )


def first_samples(layout: StepLayout) -> list[int]:
    """Where the samples of each sampled chunk begin among those of a step that speculates."""
    return [0, *accumulate(1 + count for count in layout.num_drafts)][:-1]


class SpeculativeSteps:
    """Finishes steps that verify drafts or propose some; ``proposer`` is None where the host
    proposes."""

    def __init__(
        self,
        config: EngineConfig,
        state: DeviceState,
        sampler: Sampler,
        proposer: DeviceProposer | None,
    ) -> None:
        assert config.speculative_config is not None
        self._state, self._sampler, self._proposer = state, sampler, proposer
        self._most_uncertain = config.depth * config.speculative_config.num_speculative_tokens
        self.graphs: ProposeGraphs | None = None
        """What replays all that comes behind sampling, where there is a GPU."""

    def needs_edits(self, layout: StepLayout) -> bool:
        """Does a row need more than a graph does: edits of its logits, or log-probabilities?"""
        slots = [layout.slots[index] for index in layout.sampled]
        ends = np.array([layout.context_lens[index] for index in layout.sampled], dtype=np.int64)
        fewest = ends - np.array(layout.num_drafts) - self._most_uncertain * any(layout.uncertain)
        return self._state.sampling.needs_edits(np.array(slots), fewest)

    def finish(
        self,
        batch: ScheduledBatch,
        layout: StepLayout,
        rows: StepRows,
        prompt_rows: Sequence[PromptRows] = (),
    ) -> LocalStep:
        """Samples the rows of the sampled chunks, unless a graph did, accepts drafts, proposes new
        ones."""
        state = self._state
        result = self.sample(layout, rows) if rows.drawn is None else SampleResult(rows.drawn)
        num_accepted, drafts = self._accept_and_propose(layout, rows, result.token_ids)
        verified = VerifiedRows(rows.first, num_accepted)
        if drafts is not None and batch.masked:  # whose masks after them the host has to fill
            verified = VerifiedRows(rows.first, num_accepted, layout.num_proposed, drafts)
        return LocalStep(batch, state.params_by_slot, result, prompt_rows, state.device, verified)

    def sample(self, layout: StepLayout, rows: StepRows) -> SampleResult:
        """Samples all rows, by the requests' own parameters."""
        state, slots, places = self._state, layout.sampling_slots, layout.sampling_positions
        uncertain = None
        if any(layout.uncertain):
            fewest = np.maximum(places - self._most_uncertain, 0)
            uncertain = UncertainRows(fewest, rows.places)
        return self._sampler(
            rows.logits, slots, places, state.token_table, state.sampling, uncertain
        )

    def _accept_and_propose(
        self, layout: StepLayout, rows: StepRows, token_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """How many drafts each sampled chunk accepts ``[R]``, and its next ones ``[R, k]``, if any
        chunk wants some."""
        wants_drafts = any(layout.num_proposed)
        if self.graphs is not None and (shape := self.graphs.shape_for(layout)) is not None:
            if rows.drawn is None:
                self.graphs.sampled.fill(token_ids, rows.places, rows.hidden)
            num_accepted, drafts = self.graphs.run(shape, layout, rows.first)
            return num_accepted, drafts if wants_drafts else None
        state = self._state
        slots = [layout.slots[index] for index in layout.sampled]
        packed = np.array([rows.first, layout.num_drafts, slots], dtype=np.int64)
        first, num_drafts, device_slots = to_device(packed, state.device)
        num_accepted = ops.accept_drafts_(
            token_ids,
            first,
            num_drafts,
            device_slots,
            rows.places.index_select(0, first),
            state.token_table,
            state.last_positions,
        )
        if not wants_drafts:
            return num_accepted, None
        last = ops.last_samples(first, num_accepted, token_ids, rows.places, rows.hidden)
        return num_accepted, self._propose(layout, device_slots, last)

    def _propose(
        self, layout: StepLayout, slots: Tensor, samples: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Drafts ``[R, k]`` behind all sampled chunks' last ``samples``; also in the token table.
        Of a chunk that wants fewer, the next step verifies fewer."""
        assert self._proposer is not None, "the scheduler asks only a proposer on the device"
        token_ids, positions, hidden = samples
        rows = DraftRows(slots, positions, token_ids, hidden)
        drafts = self._proposer.propose(rows, max(layout.num_proposed))
        ops.write_drafts_(self._state.token_table, slots, positions, drafts)
        return drafts
