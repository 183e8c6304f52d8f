"""Runs scheduled steps on one device. The hot file: it stays minimal."""

import torch
from torch import Tensor

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.modeling.device_state import DeviceState, StepInputs
from mini_infer.modeling.kv_memory import allocate_kv_cache, num_blocks_that_fit
from mini_infer.modeling.layers import activation_dtype
from mini_infer.modeling.load import load_model
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.sampler import Sampler, SampleResult
from mini_infer.modeling.step_result import LocalStep, PromptRows, compute_prompt_rows


class ModelRunner:
    """Model, KV cache and device state; ``execute`` turns a ``ScheduledBatch`` into tokens.

    Which phase a request is in is nobody's business here: a chunk is a slot, a start and a length.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self._files = files
        self._sampler = Sampler()

    def load(self) -> None:
        """Builds the model and its weights on the device."""
        self.model = load_model(self.config, self._files)
        self.state = DeviceState(self.config, self.device)
        self._kv_dtype = activation_dtype(self.model.embed_tokens.weight)

    def profile_num_blocks(self) -> int:
        """Number of KV blocks that fit the memory set aside for them."""
        return num_blocks_that_fit(self.config, self.model.kv_layout, self._kv_dtype)

    def init_cache(self, num_blocks: int) -> None:
        """Makes each layer's ``k, v [num_blocks, block_size, num_kv_heads, head_dim]``."""
        self.caches = allocate_kv_cache(
            self.config, self.model.kv_layout, num_blocks, self._kv_dtype
        )

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> LocalStep:
        """Runs one step; on a GPU returns before it is done."""
        inputs = self.state.prepare(batch)
        hidden = self.model(inputs.token_ids, inputs.positions, self.caches, inputs.meta)
        prompt_rows = self._prompt_rows(batch, inputs, hidden)
        result = self._sample(inputs, hidden) if inputs.sampling_slots else None
        return LocalStep(batch, self.state.params_by_slot, result, prompt_rows)

    def release(self) -> None:
        """Frees weights and cache."""
        self.caches = []
        self.__dict__.pop("model", None)

    def _sample(self, inputs: StepInputs, hidden: Tensor) -> SampleResult:
        logits = self.model.compute_logits(hidden.index_select(0, inputs.logits_indices))
        result = self._sampler(
            logits,
            inputs.sampling_slots,
            inputs.sampling_positions,
            self.state.token_table,
            self.state.sampling,
        )
        self.state.append_tokens(inputs, result.token_ids)
        return result

    def _prompt_rows(
        self, batch: ScheduledBatch, inputs: StepInputs, hidden: Tensor
    ) -> list[PromptRows]:
        if not self.state.any_prompt_logprobs(batch):
            return []
        return compute_prompt_rows(batch, inputs, hidden, self.model.compute_logits, self.state)
