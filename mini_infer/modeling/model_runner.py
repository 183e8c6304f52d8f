"""Runs scheduled steps on one device. The hot file: it stays minimal."""

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels import ops
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.chunk_graphs import ChunkGraphs
from mini_infer.modeling.cuda_graphs import DecodeGraphs
from mini_infer.modeling.device_state import DeviceState, StepInputs
from mini_infer.modeling.kv_memory import allocate_kv_cache, num_blocks_that_fit
from mini_infer.modeling.layers import activation_dtype
from mini_infer.modeling.load import load_model
from mini_infer.modeling.memory_profile import num_blocks_beside_steps
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.profiling import step_range
from mini_infer.modeling.sampler import Sampler, SampleResult, mask_
from mini_infer.modeling.step_layout import Integers, StepLayout
from mini_infer.modeling.step_result import (
    LocalStep,
    MaskedStep,
    PromptRows,
    compute_prompt_rows,
    device_failures,
)
from mini_infer.modeling.upload import to_device


class ModelRunner:
    """Model, KV cache and device state; ``execute`` turns a ``ScheduledBatch`` into tokens.

    Which phase a request is in is nobody's business here: a chunk is a slot, a start and a length.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.caches: list[KVCache] = []
        self._files = files
        self._sampler = Sampler()
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None

    def load(self) -> None:
        """Builds the model and its weights on the device."""
        self.model = load_model(self.config, self._files)
        self.state = DeviceState(self.config, self.device)
        self.dtype = activation_dtype(self.model.embed_tokens.weight)

    def profile_num_blocks(self) -> int:
        """Number of KV blocks: what was asked for, or what fits beside the largest steps."""
        if self.config.num_kv_blocks is None and self.config.kv_cache_memory is None:
            return num_blocks_beside_steps(self)
        return num_blocks_that_fit(self.config, self.model.kv_layout, self.dtype)

    def init_cache(self, num_blocks: int) -> None:
        """Makes each layer's ``k, v [num_blocks, block_size, num_kv_heads, head_dim]``, with a
        further block for surplus rows where there are CUDA graphs."""
        layout, surplus = self.model.kv_layout, int(self.has_graphs)
        self.caches = allocate_kv_cache(self.config, layout, num_blocks + surplus, self.dtype)
        if surplus:
            self.state.set_null_block(num_blocks)

    def capture_graphs(self) -> None:
        """Records decodes of all batch sizes and small steps with chunks; needs ``init_cache``."""
        if self.has_graphs:
            self._graphs, self._chunk_graphs = self.new_graphs()
            self._graphs.capture()
            self._chunk_graphs.capture()

    def new_graphs(self) -> tuple[DecodeGraphs, ChunkGraphs]:
        """Graphs over the model and cache that are there, not yet recorded; they share memory."""
        pool = torch.cuda.graph_pool_handle()
        where = self.config, self.model, self.caches, self.state
        return DecodeGraphs(*where, self.dtype, pool), ChunkGraphs(*where, self.dtype, pool)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> LocalStep | MaskedStep:
        """Runs one step, one with masked chunks up to its sampling; on a GPU returns before it is
        done.

        Raises:
            EngineDeadError: the device failed for good.
        """
        with step_range(batch), device_failures():
            self.state.take_in(batch)
            layout = StepLayout.of(batch)
            if self._graphs is not None and layout.is_decode:
                return self._replay(self._graphs, batch, layout)
            prompt_rows: list[PromptRows] = []
            if self.state.any_prompt_logprobs(batch):
                x = self._all_tokens(layout)
                prompt_rows = compute_prompt_rows(
                    batch, layout.first_rows, x, self.model.compute_logits, self.state
                )
                x = x.index_select(0, to_device(layout.last_tokens, self.device))
            else:
                x = self._last_tokens(layout)
            result = None
            if layout.sampled:
                if len(layout.sampled) < layout.num_rows:
                    rows = np.array(layout.sampled, dtype=np.int64)
                    x = x.index_select(0, to_device(rows, self.device))
                logits = self.model.compute_logits(x)
                if batch.masked:
                    return self._masked_step(batch, layout, logits, prompt_rows)
                result = self._sample(logits, layout.sampling_slots, layout.sampling_positions)
            return LocalStep(batch, self.state.params_by_slot, result, prompt_rows, self.device)

    def release(self) -> None:
        """Frees weights, cache and graphs."""
        self._graphs = self._chunk_graphs = None
        self.caches = []
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

    def _last_tokens(self, layout: StepLayout) -> Tensor:
        """The residual stream ``[R, hidden]`` of each chunk's last token."""
        if self._chunk_graphs is not None:
            x = self._chunk_graphs.run(layout)
            if x is not None:
                return x
        inputs = self.state.lay_out(layout)
        wanted = inputs.meta.last_tokens() if layout.num_tokens > layout.num_rows else None
        return self._forward(inputs, wanted)

    def _all_tokens(self, layout: StepLayout) -> Tensor:
        """The residual stream ``[T, hidden]``."""
        return self._forward(self.state.lay_out(layout), None)

    def _forward(self, inputs: StepInputs, wanted: Tensor | None) -> Tensor:
        hidden: Tensor = self.model(
            inputs.token_ids, inputs.positions, self.caches, inputs.meta, wanted
        )
        return hidden

    def _replay(
        self, graphs: DecodeGraphs, batch: ScheduledBatch, layout: StepLayout
    ) -> LocalStep | MaskedStep:
        slots, positions = layout.sampling_slots, layout.sampling_positions
        token_ids, logits = graphs.run(slots, np.array(layout.starts, dtype=np.int64))
        if batch.masked:  # what the graph drew is drawn anew
            return self._masked_step(batch, layout, logits, [])
        result = SampleResult(token_ids)
        if self.state.sampling.needs_edits(slots, positions):
            result = self._sample(logits, slots, positions)  # over what the graph drew
        return LocalStep(batch, self.state.params_by_slot, result, [], self.device)

    def _masked_step(
        self,
        batch: ScheduledBatch,
        layout: StepLayout,
        logits: Tensor,
        prompt_rows: list[PromptRows],
    ) -> MaskedStep:
        """A step whose ``logits``, the sampled chunks', wait for their masks."""

        @torch.inference_mode()
        def sample(masks: bytearray) -> LocalStep:
            with device_failures():
                words = np.frombuffer(masks, dtype=np.int32).reshape(len(batch.masked), -1)
                rows = np.searchsorted(layout.sampled, batch.masked)
                mask_(logits, to_device(rows, self.device), to_device(words, self.device))
                result = self._sample(logits, layout.sampling_slots, layout.sampling_positions)
                state = self.state
                return LocalStep(batch, state.params_by_slot, result, prompt_rows, self.device)

        return MaskedStep(sample)

    def _sample(self, logits: Tensor, slots: Integers, positions: Integers) -> SampleResult:
        state = self.state
        result = self._sampler(logits, slots, positions, state.token_table, state.sampling)
        state.append_tokens(slots, positions, result.token_ids)
        return result
