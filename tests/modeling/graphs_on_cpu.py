"""An engine's CUDA graphs without a GPU: what they would record is run anew at every replay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_infer.kernels.cpu_attention import RowGroup
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling import (
    chunk_graphs,
    cuda_graphs,
    sampling_graphs,
    speculative_graphs,
    step_result,
)
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState, StepInputs
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.sampler import Sampler
from mini_infer.modeling.sampling_state import SamplingState
from mini_infer.modeling.step_layout import StepLayout


class Replayed:
    """Runs the step anew, as a graph does."""

    def __init__(self, step: Callable[[], None], pool: Any, **_: bool) -> None:
        self._step = step

    @torch.inference_mode()
    def replay(self) -> None:
        self._step()


class RowsWithQueries(AttentionMetadata):
    """A graph's surplus rows may have none."""

    def row_groups(self, block_size: int) -> list[RowGroup]:
        return [group for group in super().row_groups(block_size) if group.query_len]


def with_real_lengths(**fields: Any) -> AttentionMetadata:
    """A CPU's attention asks the host how long rows are, and a graph's host does not know."""
    fields["query_lens"] = tuple(fields["cu_seqlens_q"].diff().tolist())
    fields["context_lens"] = tuple(fields["seqlens_k"].tolist())
    return RowsWithQueries(**fields)


def draw(
    logits: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    state: SamplingState,
    token_table: Tensor | None = None,
) -> Tensor:
    """The sampler's draw in place of the kernel's, which the interpreter takes seconds for."""
    token_ids = Sampler().draw_drafts(logits, slots, num_tokens, state)
    if token_table is not None:
        token_table[slots, num_tokens] = token_ids.int()
    return token_ids


def replay_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runners on a CPU have graphs. Where requests of a step start, only the device knows, as
    on a GPU."""
    monkeypatch.setattr(ModelRunner, "has_graphs", True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(chunk_graphs, "_seconds", lambda work: 0.0)
    for module in (chunk_graphs, cuda_graphs, sampling_graphs, speculative_graphs):
        monkeypatch.setattr(module, "record", Replayed)
    for module in (cuda_graphs, sampling_graphs, speculative_graphs):
        monkeypatch.setattr(module, "draw", draw)
    for module in (chunk_graphs, cuda_graphs, speculative_graphs):
        monkeypatch.setattr(module, "AttentionMetadata", with_real_lengths)
    monkeypatch.setattr(step_result, "to_host", Tensor.clone)

    compute_logits = CausalLM.compute_logits

    def logits_in_place(model: CausalLM, x: Tensor, out: Tensor | None = None) -> Tensor:
        logits = compute_logits(model, x)  # a CPU's products choose their own place
        return logits if out is None else out.copy_(logits)

    monkeypatch.setattr(CausalLM, "compute_logits", logits_in_place)
    find_starts, lay_out = DeviceState.with_known_starts, DeviceState.lay_out

    def laid_out(state: DeviceState, layout: StepLayout) -> StepInputs:
        return lay_out(state, find_starts(state, layout))  # of steps that are no graph's

    monkeypatch.setattr(DeviceState, "with_known_starts", lambda state, layout: layout)
    monkeypatch.setattr(DeviceState, "lay_out", laid_out)
