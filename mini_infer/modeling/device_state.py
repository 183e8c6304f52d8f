"""What a device knows about its requests between steps: tokens, block tables, sampling columns.

Each admitted request owns a slot, a row of every table here. Because sampled tokens are scattered
back into the token table on the device, the next step can be launched before the host has seen
them.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.sampling_state import SamplingState
from mini_infer.modeling.step_layout import Integers, StepLayout
from mini_infer.modeling.upload import copy_to_device, to_device


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors: T tokens of R chunks."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    meta: AttentionMetadata


FEW_WRITES = 4
"""So many are copied one by one: cheaper than to tell each value its place."""


@dataclass(frozen=True, slots=True)
class _Writes:
    """Values to write into rows of a table, collected over a step; many are one upload and one
    kernel."""

    row_length: int
    starts: list[int] = field(default_factory=list)
    values: list["array[int]"] = field(default_factory=list)
    """Integers from 0 on, packed as unsigned ones: a third of the time that NumPy takes to read
    thousands of Python's, or ``array`` signed ones. A first token waits for its prompt's."""

    def add(self, row: int, column: int, values: Sequence[int]) -> None:
        """Values that go on where the last ones end, as a chunk's blocks behind those of its
        request's prefix do, join them."""
        start = row * self.row_length + column
        if self.starts and start == self.starts[-1] + len(self.values[-1]):
            self.values[-1].extend(values)
        elif values:
            self.starts.append(start)
            self.values.append(array("Q", values))

    def apply_to(self, table: Tensor) -> None:
        if len(self.values) <= FEW_WRITES:
            kind = np.int64 if table.dtype == torch.int64 else np.int32
            for start, values in zip(self.starts, self.values, strict=True):
                row = table.view(-1)[start : start + len(values)]
                copy_to_device(np.frombuffer(values, np.int64).astype(kind, copy=False), row)
            return
        counts = [len(values) for values in self.values]
        packed = np.empty((2, sum(counts)), dtype=np.int64)
        end = 0
        for start, count, values in zip(self.starts, counts, self.values, strict=True):
            packed[0, end : end + count] = np.arange(start, start + count)
            packed[1, end : end + count] = np.frombuffer(values, np.int64)
            end += count
        places, values_there = to_device(packed, table.device)
        table.view(-1).index_copy_(0, places, values_there.to(table.dtype))


class DeviceState:
    """Per-slot tables: ``token_table [slots + 1, max_model_len]``, ``block_table
    [slots + 1, max_blocks]`` and the sampler's columns. The first two have room for
    ``max_drafts_ahead`` tokens more.

    The last slot is nobody's: a CUDA graph's surplus rows own it. Its blocks are ``null_block``.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        num_slots = config.max_num_seqs
        self.null_slot = num_slots
        self.block_size = config.block_size
        self.device = device
        self.attention_backend = config.attention_backend
        rows, ahead = num_slots + 1, config.max_drafts_ahead
        self.token_table = torch.zeros(
            rows, config.max_model_len + ahead, dtype=torch.int32, device=device
        )
        num_columns = config.max_blocks_per_request + -(-ahead // config.block_size)
        self.block_table = torch.zeros(rows, num_columns, dtype=torch.int32, device=device)
        self.last_positions = torch.zeros(rows, dtype=torch.int64, device=device)
        """``[slots + 1]``: where the last token stands of a request whose step was speculative."""
        self.kv_limits = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        """``[slots + 1, 1]``: tokens that a request's blocks hold. Drafts beyond have no KV."""
        self.null_block = 0
        self._speculates = config.speculative_config is not None
        self.sampling = SamplingState(num_slots, config.model_config.vocab_size, device)
        self.params_by_slot: dict[int, SamplingParams] = {}
        self.num_prompt_tokens: dict[int, int] = {}
        self._num_blocks = [0] * num_slots

    def set_null_block(self, block_id: int) -> None:
        """Gives the surplus rows of CUDA graphs, and drafts without room, a block to write to."""
        self.null_block = block_id
        self.block_table[self.null_slot] = block_id

    def take_in(self, batch: ScheduledBatch) -> None:
        """Writes the step's admissions and new blocks into the tables, for its layers. The sampler
        is told by ``sampling.admit``, for which there is time later."""
        tokens = _Writes(self.token_table.shape[1])
        blocks = _Writes(self.block_table.shape[1])
        for admission in batch.admissions:
            slot = admission.slot
            tokens.add(slot, 0, admission.token_ids)
            self.params_by_slot[slot] = admission.params
            self.num_prompt_tokens[slot] = admission.num_prompt_tokens
            self._num_blocks[slot] = 0
            self._append_blocks(blocks, slot, admission.block_ids)
        for chunk in batch.chunks:
            if chunk.new_block_ids:
                self._append_blocks(blocks, chunk.slot, chunk.new_block_ids)
            if chunk.draft_token_ids:
                end = chunk.num_computed_tokens + chunk.num_new_tokens
                tokens.add(chunk.slot, end - chunk.num_drafts, chunk.draft_token_ids)
        tokens.apply_to(self.token_table)
        blocks.apply_to(self.block_table)
        if self._speculates and blocks.starts:
            limits = _Writes(1)
            width = self.block_table.shape[1]
            for slot in dict.fromkeys(start // width for start in blocks.starts):
                limits.add(slot, 0, (self._num_blocks[slot] * self.block_size,))
            limits.apply_to(self.kv_limits)

    def with_known_starts(self, layout: StepLayout) -> StepLayout:
        """On a CPU, where a step that was submitted is over, the host can look where it led to."""
        if self.device.type != "cpu" or not any(layout.uncertain):
            return layout
        rows = zip(layout.slots, layout.starts, layout.uncertain, strict=True)
        return layout.starting_at(
            [int(self.last_positions[slot]) if which else start for slot, start, which in rows]
        )

    def lay_out(self, layout: StepLayout) -> StepInputs:
        """The tensors of a step of any chunks, after ``take_in``."""
        num_tokens, num_rows = layout.num_tokens, layout.num_rows
        starts_or_not = layout.starts
        if any(layout.uncertain):
            rows = zip(layout.starts, layout.uncertain, strict=True)
            starts_or_not = [-1 if uncertain else start for start, uncertain in rows]
        slots, starts, cu_seqlens_q = self._upload(layout.slots, starts_or_not, layout.first_rows)
        if starts_or_not is not layout.starts:
            starts = torch.where(starts < 0, self.last_positions[slots], starts)
        max_context = max(layout.context_lens)
        num_columns = -(-max_context // self.block_size)
        tables = self.token_table, self.block_table
        if num_tokens == num_rows:  # one token each: rows are requests
            positions = starts
            token_ids, seqlens_k, slot_mapping, block_table = ops.decode_inputs(
                slots, starts, *tables, self.block_size, num_columns
            )
        else:
            token_ids, positions, seqlens_k, slot_mapping, block_table = ops.chunk_inputs(
                slots, starts, cu_seqlens_q, num_tokens, *tables, self.block_size, num_columns
            )
        meta = AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            block_table=block_table,
            slot_mapping=slot_mapping,
            max_query_len=max(layout.query_lens),
            max_seqlen_k=max_context,
            query_lens=tuple(layout.query_lens),
            context_lens=tuple(layout.context_lens),
            backend=self.attention_backend,
        )
        return StepInputs(token_ids, positions, meta)

    def append_tokens(self, slots: Integers, positions: Integers, token_ids: Tensor) -> None:
        """Scatters ``token_ids [S]`` to each slot's position in the token table."""
        places = to_device(slots * self.token_table.shape[1] + positions, self.device)
        self.token_table.view(-1).index_copy_(0, places, token_ids.to(self.token_table.dtype))

    def any_prompt_logprobs(self, batch: ScheduledBatch) -> bool:
        """Does a chunk of the batch have to report its prompt's log-probabilities?"""
        return any(
            self.params_by_slot[chunk.slot].prompt_logprobs is not None
            and chunk.num_computed_tokens < self.num_prompt_tokens[chunk.slot] - 1
            for chunk in batch.chunks
        )

    def _append_blocks(self, blocks: _Writes, slot: int, block_ids: Sequence[int]) -> None:
        blocks.add(slot, self._num_blocks[slot], block_ids)
        self._num_blocks[slot] += len(block_ids)

    def _upload(self, *columns: list[int]) -> tuple[Tensor, ...]:
        """Each column as an int64 tensor on the device, in one copy."""
        lengths = [len(column) for column in columns]
        packed: NDArray[Any] = np.fromiter(
            (value for column in columns for value in column), dtype=np.int64, count=sum(lengths)
        )
        return torch.split(to_device(packed, self.device), lengths)
