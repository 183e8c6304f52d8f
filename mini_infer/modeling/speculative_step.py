"""Steps with drafts, behind the model's layers: sample, accept, propose.

Each row of a chunk samples at its own place, as it would alone; the drafts before it are its past.
A draft that the sampler itself arrives at is accepted, so what comes out is what plain decoding
samples, whoever proposed (arXiv 2408.07978).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
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


@dataclass(frozen=True, slots=True)
class StepRows:
    """S rows of logits of a step that speculates, each with its place in its request.

    Attributes:
        hidden: ``[S, hidden]``, the residual stream.
        logits: ``[S, vocab]``.
        places: ``[S]`` int64 on the device: where what is sampled will stand.
    """

    hidden: Tensor
    logits: Tensor
    places: Tensor


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

    def finish(
        self,
        batch: ScheduledBatch,
        layout: StepLayout,
        rows: StepRows,
        prompt_rows: Sequence[PromptRows] = (),
    ) -> LocalStep:
        """Samples the rows of the sampled chunks, accepts drafts, proposes new ones."""
        state = self._state
        result = self.sample(layout, rows)
        counts = [1 + count for count in layout.num_drafts]
        first_samples = [0, *accumulate(counts)][:-1]
        slots = [layout.slots[index] for index in layout.sampled]
        packed = np.array([first_samples, layout.num_drafts, slots], dtype=np.int64)
        first, num_drafts, device_slots = to_device(packed, state.device)
        num_accepted = ops.accept_drafts_(
            result.token_ids,
            first,
            num_drafts,
            device_slots,
            rows.places.index_select(0, first),
            state.token_table,
            state.last_positions,
        )
        verified = VerifiedRows(first_samples, num_accepted)
        if any(layout.num_proposed):
            drafts = self._propose(layout, device_slots, first + num_accepted, rows, result)
            if batch.masked:  # whose masks after the drafts the host will have to fill
                verified = VerifiedRows(first_samples, num_accepted, layout.num_proposed, drafts)
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

    def _propose(
        self,
        layout: StepLayout,
        slots: Tensor,
        last_samples: Tensor,
        rows: StepRows,
        result: SampleResult,
    ) -> Tensor:
        """Drafts ``[R, k]`` behind all sampled chunks' last tokens, which are the samples
        ``last_samples [R]``; also in the token table. Of a chunk that wants fewer, the next step
        verifies fewer."""
        assert self._proposer is not None, "the scheduler asks only a proposer on the device"
        positions = rows.places.index_select(0, last_samples)
        drafts = self._proposer.propose(
            DraftRows(
                slots=slots,
                positions=positions,
                token_ids=result.token_ids.index_select(0, last_samples),
                hidden=rows.hidden.index_select(0, last_samples),
            ),
            max(layout.num_proposed),
        )
        write_drafts_(self._state.token_table, slots, positions, drafts)
        return drafts


def write_drafts_(token_table: Tensor, slots: Tensor, positions: Tensor, drafts: Tensor) -> None:
    """Puts ``drafts [R, k]`` behind the ``positions [R]`` of the slots' last tokens."""
    places = positions[:, None] + torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    token_table.index_put_((slots[:, None], places), drafts.to(token_table.dtype))
