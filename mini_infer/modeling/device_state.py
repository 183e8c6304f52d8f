"""What a device knows about its requests between steps: tokens, block tables, sampling columns.

Each admitted request owns a slot, a row of every table here. Because sampled tokens are scattered
back into the token table on the device, the next step can be launched before the host has seen
them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer.core.batch import Admission, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.sampling_state import SamplingState


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors: T tokens of R chunks, of which S are sampled."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    meta: AttentionMetadata
    logits_indices: Tensor
    """[S] rows of hidden states that are sampled"""
    sampling_slots: list[int]
    sampling_positions: list[int]
    """Where the sampled tokens will stand."""
    first_rows: list[int]
    """Per chunk, the row of its first token."""


class DeviceState:
    """Per-slot tables: ``token_table [slots, max_model_len]``, ``block_table [slots, max_blocks]``
    and the sampler's columns."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        num_slots = config.max_num_seqs
        self.block_size = config.block_size
        self._attention_backend = config.attention_backend
        self.device = device
        self.token_table = torch.zeros(
            num_slots, config.max_model_len, dtype=torch.int64, device=device
        )
        self.block_table = torch.zeros(
            num_slots, config.max_blocks_per_request, dtype=torch.int32, device=device
        )
        self.sampling = SamplingState(num_slots, config.model_config.vocab_size, device)
        self.params_by_slot: dict[int, SamplingParams] = {}
        self.num_prompt_tokens: dict[int, int] = {}
        self._num_blocks = [0] * num_slots

    def prepare(self, batch: ScheduledBatch) -> StepInputs:
        """Takes in admissions and new blocks, and lays out the step's tokens."""
        for admission in batch.admissions:
            self._admit(admission)
        for chunk in batch.chunks:
            if chunk.new_block_ids:
                self._append_blocks(chunk.slot, chunk.new_block_ids)
        return self._lay_out(batch)

    def append_tokens(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """Scatters sampled ``token_ids [S]`` behind their requests' last tokens."""
        slots = self._tensor(inputs.sampling_slots)
        positions = self._tensor(inputs.sampling_positions)
        self.token_table[slots, positions] = token_ids

    def any_prompt_logprobs(self, batch: ScheduledBatch) -> bool:
        """Does a chunk of the batch have to report its prompt's log-probabilities?"""
        return any(
            self.params_by_slot[chunk.slot].prompt_logprobs is not None
            and chunk.num_computed_tokens < self.num_prompt_tokens[chunk.slot] - 1
            for chunk in batch.chunks
        )

    def _admit(self, admission: Admission) -> None:
        slot = admission.slot
        tokens = self._tensor(list(admission.token_ids))
        self.token_table[slot, : len(tokens)] = tokens
        self.params_by_slot[slot] = admission.params
        self.num_prompt_tokens[slot] = admission.num_prompt_tokens
        self._num_blocks[slot] = 0
        self._append_blocks(slot, admission.block_ids)
        self.sampling.admit(admission)

    def _append_blocks(self, slot: int, block_ids: tuple[int, ...]) -> None:
        first = self._num_blocks[slot]
        last = self._num_blocks[slot] = first + len(block_ids)
        self.block_table[slot, first:last] = torch.tensor(
            block_ids, dtype=torch.int32, device=self.device
        )

    def _lay_out(self, batch: ScheduledBatch) -> StepInputs:
        chunks = batch.chunks
        query_lens = [chunk.num_new_tokens for chunk in chunks]
        starts = [chunk.num_computed_tokens for chunk in chunks]
        context_lens = [start + new for start, new in zip(starts, query_lens, strict=True)]
        first_rows = [0]
        for length in query_lens:
            first_rows.append(first_rows[-1] + length)
        slots = self._tensor([chunk.slot for chunk in chunks])
        cu_seqlens_q = self._tensor(first_rows)
        if first_rows[-1] == len(chunks):  # one token each: rows are requests
            token_slots, positions = slots, self._tensor(starts)
        else:
            lens = self._tensor(query_lens)
            token_slots = slots.repeat_interleave(lens, output_size=first_rows[-1])
            offsets = self._tensor(starts) - cu_seqlens_q[:-1]
            positions = torch.arange(first_rows[-1], device=self.device)
            positions += offsets.repeat_interleave(lens, output_size=first_rows[-1])
        blocks = self.block_table[token_slots, positions // self.block_size]
        max_context = max(context_lens)
        meta = AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=self._tensor(context_lens),
            block_table=self.block_table[slots, : -(-max_context // self.block_size)],
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            max_query_len=max(query_lens),
            max_seqlen_k=max_context,
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            backend=self._attention_backend,
        )
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        return StepInputs(
            token_ids=self.token_table[token_slots, positions],
            positions=positions,
            meta=meta,
            logits_indices=self._tensor([first_rows[index + 1] - 1 for index in sampling]),
            sampling_slots=[chunks[index].slot for index in sampling],
            sampling_positions=[context_lens[index] for index in sampling],
            first_rows=first_rows[:-1],
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
