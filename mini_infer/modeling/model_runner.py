"""Runs scheduled steps on one device. The hot file: it stays minimal."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels import ops
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.device_state import DeviceState, StepInputs
from mini_infer.modeling.kv_memory import allocate_kv_cache, num_blocks_that_fit
from mini_infer.modeling.layers import activation_dtype
from mini_infer.modeling.load import load_model
from mini_infer.modeling.memory_profile import num_blocks_beside_steps
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.profiling import step_range
from mini_infer.modeling.proposers.agreed import agreed
from mini_infer.modeling.proposers.load import load_device_proposer, load_draft
from mini_infer.modeling.proposers.proposer import DeviceProposer, FollowingProposer
from mini_infer.modeling.sampler import Sampler, SampleResult, mask_
from mini_infer.modeling.speculative_step import SpeculativeSteps, StepRows, first_samples
from mini_infer.modeling.stage import Stage
from mini_infer.modeling.step_graphs import GraphSet, StepGraphs
from mini_infer.modeling.step_layout import Integers, StepLayout
from mini_infer.modeling.step_result import (
    LocalStep,
    MaskedStep,
    PromptRows,
    compute_prompt_rows,
    device_failures,
)
from mini_infer.modeling.upload import to_device
from mini_infer.parallel.group import SINGLE, TensorParallelGroup


class ModelRunner:
    """Model, KV cache and device state; ``execute`` turns a ``ScheduledBatch`` into tokens.

    Which phase a request is in is nobody's business here: a chunk is a slot, a start and a length.
    """

    def __init__(
        self, config: EngineConfig, files: ModelFiles, group: TensorParallelGroup = SINGLE
    ) -> None:
        """``group`` are the ranks that share the model: they execute the same steps."""
        self.config = config
        self.group = group
        self.stage: Stage | None = None
        self.device = torch.device(config.device)
        self.caches: list[KVCache] = []
        self._files = files
        self._sampler = Sampler()
        self.graphs: StepGraphs | None = None
        self._draft: nn.Module | None = None
        self.proposer: DeviceProposer | None = None
        self._follower: FollowingProposer | None = None
        """``proposer``, if it follows all steps: told once, as to look takes microseconds."""
        self._speculative: SpeculativeSteps | None = None

    def load(self) -> None:
        """Builds the model, what drafts for it if that has weights, and these on the device."""
        config = self.config
        self.model = load_model(config, self._files, self.group, self.stage)
        self._draft = load_draft(config, self.model)
        self.state = DeviceState(config, self.device)
        weight = torch.empty(0, dtype=getattr(torch, config.dtype), device=self.device)
        self.dtype = activation_dtype(weight)

    def profile_num_blocks(self) -> int:
        """Number of KV blocks: what was asked for, or what fits beside the largest steps."""
        if self.config.num_kv_blocks is None and self.config.kv_cache_memory is None:
            return num_blocks_beside_steps(self)
        layout, num_layers = self.model.kv_layout, len(self.model.layers)
        return num_blocks_that_fit(self.config, layout, self.dtype, num_layers)

    def slowest(self, seconds: float) -> float:
        """The largest of what all ranks measured: who decides by the clock must decide alike."""
        return self.group.slowest(seconds)

    def init_cache(self, num_blocks: int) -> None:
        """Makes each layer's ``k, v [num_blocks, block_size, num_kv_heads, head_dim]``, with a
        further block for surplus rows where there are CUDA graphs."""
        config, layout = self.config, self.model.kv_layout
        surplus = int(self.has_graphs or config.speculates_on_device)
        self.proposer = self._follower = self._speculative = (
            None  # a profile's would stay beside the new one
        )
        self.caches = allocate_kv_cache(
            config, layout, num_blocks + surplus, self.dtype, len(self.model.layers)
        )
        if surplus:
            self.state.set_null_block(num_blocks)
        if config.speculates_on_device:
            target = config, self.model, self.caches, self.state
            self.proposer = agreed(load_device_proposer(*target, self._draft), self.group)
            self._follower = self.proposer if isinstance(self.proposer, FollowingProposer) else None
        if config.speculative_config is not None:
            self._speculative = SpeculativeSteps(config, self.state, self._sampler, self.proposer)

    def capture_graphs(self) -> None:
        """Records decodes of all batch sizes, small steps with chunks, and steps with drafts; needs
        ``init_cache``."""
        if self.has_graphs:
            self.graphs = self._step_graphs()
            self.graphs.capture()
            if self._speculative is not None:
                self._speculative.graphs = self.graphs.proposals

    def new_graphs(self) -> GraphSet:
        """Graphs over the model and cache that are there, not yet recorded."""
        return self._step_graphs()

    def _step_graphs(self) -> StepGraphs:
        target = self.config, self.model, self.caches, self.state
        return StepGraphs.over(*target, self.dtype, self.proposer)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> LocalStep | MaskedStep:
        """Runs one step, one with masked chunks up to its sampling; on a GPU returns before it is
        done.

        Raises:
            EngineDeadError: the device failed for good.
        """
        with step_range(batch), device_failures():
            self.state.take_in(batch)
            if self._follower is not None:
                self._follower.follow(batch)
            layout = StepLayout.of(batch)
            if layout.speculates:
                return self._speculative_step(batch, layout)
            if self.graphs is not None and layout.is_decode:
                self.state.sampling.admit(batch.admissions)
                return self._sampled_step(batch, layout, *self.graphs.decodes.run(layout))
            x, prompt_rows = self._layers(batch, layout)
            self.state.sampling.admit(batch.admissions)  # while a device computes the layers
            if not layout.sampled:
                return LocalStep(batch, self.state.params_by_slot, None, prompt_rows, self.device)
            return self._sampled_step(batch, layout, *self._head(x, layout), prompt_rows)

    def _speculative_step(
        self, batch: ScheduledBatch, layout: StepLayout
    ) -> LocalStep | MaskedStep:
        """A step that verifies drafts, or has some proposed."""
        state, steps = self.state, self._speculative
        assert steps is not None, "only a scheduler that speculates plans such steps"
        layout = state.with_known_starts(layout)
        rows, prompt_rows = self._speculative_rows(batch, layout)
        if rows.drawn is not None and (batch.masked or steps.needs_edits(layout)):
            rows = rows.to_sample(layout)
        if not batch.masked:
            return steps.finish(batch, layout, rows, prompt_rows)
        return self._masked_step(
            batch, layout, rows.logits, lambda: steps.finish(batch, layout, rows, prompt_rows)
        )

    def _speculative_rows(
        self, batch: ScheduledBatch, layout: StepLayout
    ) -> tuple[StepRows, list[PromptRows]]:
        """What a step that speculates samples from, and what its other tokens say about prompts, if
        anybody asked."""
        state, graphs = self.state, self.graphs
        wants_prompts = state.any_prompt_logprobs(batch)
        if graphs is not None and not wants_prompts:
            if (shape := graphs.verifications.shape_for(layout)) is not None:
                state.sampling.admit(batch.admissions)
                return graphs.verifications.run(shape, layout), []
            if (found := graphs.chunks.run_with_drafts(layout)) is not None:
                x, places = found
                state.sampling.admit(batch.admissions)
                logits = self.model.compute_logits(x)
                return StepRows(x, logits, places, first_samples(layout)), []
        inputs = state.lay_out(layout)
        sampled = to_device(layout.sampled_tokens, self.device)
        x = self._forward(inputs, None if wants_prompts else sampled)
        prompt_rows: list[PromptRows] = []
        if wants_prompts:
            compute_logits = self.model.compute_logits
            prompt_rows = compute_prompt_rows(batch, layout.first_rows, x, compute_logits, state)
            x = x.index_select(0, sampled)
        state.sampling.admit(batch.admissions)
        places = inputs.positions.index_select(0, sampled) + 1
        logits = self.model.compute_logits(x)
        return StepRows(x, logits, places, first_samples(layout)), prompt_rows

    def release(self) -> None:
        """Frees weights, cache and graphs, once the steps in flight are over: they write into the
        host's memory, too."""
        if self.graphs is not None:
            with suppress(torch.AcceleratorError):  # a device that failed runs nothing any more
                torch.cuda.synchronize()
        self.graphs = None
        self.caches = []
        self._draft = self.proposer = self._follower = self._speculative = None
        self.__dict__.pop("model", None)

    @property
    def has_graphs(self) -> bool:
        """The reference's attention looks at lengths on the host, which no graph can; and the
        sampler that a graph can hold is a Triton kernel."""
        config = self.config
        return (
            self.device.type == "cuda"
            and config.attention_backend != "torch"
            and not config.enforce_eager
            and ops.gpu_kernels() is not None
        )

    def _layers(self, batch: ScheduledBatch, layout: StepLayout) -> tuple[Tensor, list[PromptRows]]:
        """The residual stream ``[R, hidden]`` of each chunk's last token, and what the others say
        about prompts, if anybody asked."""
        if self.state.any_prompt_logprobs(batch):
            x = self._forward(self.state.lay_out(layout), None)
            rows = compute_prompt_rows(
                batch, layout.first_rows, x, self.model.compute_logits, self.state
            )
            return x.index_select(0, to_device(layout.last_tokens, self.device)), rows
        if self.graphs is not None and (last := self.graphs.chunks.run(layout)) is not None:
            return last, []
        inputs = self.state.lay_out(layout)
        wanted = inputs.meta.last_tokens() if layout.num_tokens > layout.num_rows else None
        return self._forward(inputs, wanted), []

    def _forward(self, inputs: StepInputs, wanted: Tensor | None) -> Tensor:
        hidden: Tensor = self.model(
            inputs.token_ids, inputs.positions, self.caches, inputs.meta, wanted
        )
        return hidden

    def _head(self, x: Tensor, layout: StepLayout) -> tuple[Tensor | None, Tensor]:
        """Of the sampled chunks, whose last tokens are among ``x [R, hidden]``: what a graph drew,
        if there is one, and the logits ``[S, V]``."""
        if self.graphs is not None:
            return self.graphs.ends.run(x, layout)
        if len(layout.sampled) < layout.num_rows:
            rows = np.array(layout.sampled, dtype=np.int64)
            x = x.index_select(0, to_device(rows, self.device))
        return None, self.model.compute_logits(x)

    def _sampled_step(
        self,
        batch: ScheduledBatch,
        layout: StepLayout,
        drawn: Tensor | None,
        logits: Tensor,
        prompt_rows: Sequence[PromptRows] = (),
    ) -> LocalStep | MaskedStep:
        """A step with the ``logits [S, V]`` of its sampled chunks, and what a graph drew of them.

        A graph knows no masks or other edits: where there are any, all is drawn anew.
        """
        slots, positions = layout.sampling_slots, layout.sampling_positions

        def sampled() -> LocalStep:
            result = self._sample(logits, slots, positions)
            return LocalStep(batch, self.state.params_by_slot, result, prompt_rows, self.device)

        if batch.masked:
            return self._masked_step(batch, layout, logits, sampled)
        if drawn is None or self.state.sampling.needs_edits(slots, positions):
            return sampled()
        result = SampleResult(drawn)
        return LocalStep(batch, self.state.params_by_slot, result, prompt_rows, self.device)

    def _masked_step(
        self,
        batch: ScheduledBatch,
        layout: StepLayout,
        logits: Tensor,
        finish: Callable[[], LocalStep],
    ) -> MaskedStep:
        """A step whose ``logits``, the sampled chunks', wait for their masks; then it can
        ``finish``."""

        @torch.inference_mode()
        def go_on(masks: bytearray) -> LocalStep:
            with device_failures():
                rows = layout.rows_of(batch.masked)
                words = np.frombuffer(masks, dtype=np.int32).reshape(len(rows), -1)
                mask_(logits, to_device(rows, self.device), to_device(words, self.device))
                return finish()

        return MaskedStep(go_on)

    def _sample(self, logits: Tensor, slots: Integers, positions: Integers) -> SampleResult:
        state = self.state
        result = self._sampler(logits, slots, positions, state.token_table, state.sampling)
        state.append_tokens(slots, positions, result.token_ids)
        return result
