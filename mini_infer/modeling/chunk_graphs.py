"""Steps with chunks of prompts as CUDA graphs: the layers of the model, without the head.

A short prompt, or the rest of one whose head was cached, is a step of a few dozen tokens. On a GPU
it takes as long as a decode step, but from Python its launches take several times as long; with a
small model that is so up to thousands of tokens. Such steps are padded to one of a ladder of token
counts and replayed. Where the padding would cost the device more than launches cost the host, a
step is launched as it is: which of the two is faster is measured when the graphs are recorded.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.cuda_graphs import record
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.step_layout import DEVICE_KNOWS, StepLayout
from mini_infer.modeling.upload import copy_to_device, to_device

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

LADDER = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
MAX_TOKENS = 8192
LONE_ROWS = 2
"""A chunk alone, whose first token somebody waits for, and the surplus."""
FEW_ROWS = 8
"""Most other steps with a short chunk have few rows. The rest have a graph for as many as there can
be."""
SHORT_STEP = 512
"""Tokens up to which it pays to have graphs for fewer rows, too."""

DEVICE_BOUND = 3.0
"""Times what launches take the host. Longer steps have no graph: launched they are as fast, and to
record and time graphs of them would take a large model's start-up seconds."""

Shape = tuple[int, int]
"""Rows and tokens of a graph, padding included."""


class ChunkGraphs:
    """A graph per number of tokens and of rows. Rows may have any lengths, nought as well.

    The tokens that are too many belong to one more row, which owns the null slot.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        hidden: Tensor,
        pool: "_POOL_HANDLE",
    ) -> None:
        """``hidden [max_num_seqs + 1, hidden]`` is where graphs leave each row's last token."""
        self._config, self._model, self._caches, self._state = config, model, caches, state
        self._pool = pool
        most = config.max_num_seqs + 1
        rows = sorted({min(rows, most) for rows in (LONE_ROWS, FEW_ROWS, most)})
        longest = min(config.max_step_tokens, MAX_TOKENS)
        # Not of one token: attention would take it for a decode, where no row is empty.
        self.shapes: list[Shape] = [
            (few, many)
            for many in (*(tokens for tokens in LADDER if tokens < longest), longest)
            for few in (rows if many <= SHORT_STEP else rows[-1:])
            if 1 < many <= few * (config.max_model_len - 1)
        ]
        self._inputs = torch.zeros(3 * rows[-1] + 1, dtype=torch.int64, device=state.device)
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._hidden = hidden
        self._contexts = torch.zeros(rows[-1], dtype=torch.int64, device=state.device)
        self._launch_seconds = 0.0
        self._replay_seconds: dict[Shape, float] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Records the graphs that may pay, largest first. Their kernels run on the null slot."""
        self._drop_device_bound()
        for shape in reversed(self.shapes):
            self.record(shape)
            self._replay_seconds[shape] = self._seconds(self._graphs[shape].replay)

    @torch.inference_mode()
    def record(self, shape: Shape) -> None:
        """Records one graph."""
        self._write_rehearsal(shape)
        # As in ``RowGraphs.capture``; of longer shapes ``rehearse`` runs none.
        is_alone, is_short = self._config.num_ranks == 1, shape[1] <= SHORT_STEP
        is_rehearsed = bool(self._graphs) and is_alone and is_short
        step = partial(self._step, shape)
        self._graphs[shape] = record(step, self._pool, is_rehearsed=is_rehearsed)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launches the steps of short shapes once, on the null slot, and records nothing. Longer
        ones launch no other kernels."""
        for shape in self.shapes:
            if shape[1] <= SHORT_STEP:
                self._rehearse(shape)

    def run(self, layout: StepLayout) -> Tensor | None:
        """The residual stream ``[R, hidden]`` of each chunk's last token, or None where no graph
        would be faster.

        The next step overwrites it.
        """
        num_tokens = layout.num_tokens
        shape = self._shape_for(layout.num_rows + 1, num_tokens)
        if shape is None or not self._pays(shape, num_tokens):
            return None
        self._write_inputs(shape, layout)
        self._graphs[shape].replay()
        return self._hidden[: layout.num_rows]

    def run_with_drafts(self, layout: StepLayout) -> tuple[Tensor, Tensor] | None:
        """The same of a step that verifies drafts: of each row that it samples, with the places
        ``[S]`` of the samples.

        Each draft is a row of its own here, of one token. Its keys are written before any row
        attends, as those of all tokens of a step are.
        """
        rows = layout.with_drafts_as_rows()
        x = self.run(rows) if rows.num_rows < len(self._contexts) else None
        if x is None:
            return None
        if len(rows.sampled) == rows.num_rows:
            return x, self._contexts[: rows.num_rows]
        which = to_device(np.array(rows.sampled, dtype=np.int64), x.device)
        return x.index_select(0, which), self._contexts.index_select(0, which)

    def _shape_for(self, num_rows: int, num_tokens: int) -> Shape | None:
        for rows, tokens in self.shapes:
            if rows >= num_rows and tokens >= num_tokens:
                return (rows, tokens) if tokens - num_tokens < self._config.max_model_len else None
        return None

    def _pays(self, shape: Shape, num_tokens: int) -> bool:
        """Is replaying faster than launching ``num_tokens``, which needs no padding?

        Launched, a step takes what the host needs or what the device does, whichever is more.
        """
        replay = self._replay_seconds[shape]
        return replay <= max(self._launch_seconds, replay * num_tokens / shape[1])

    def _drop_device_bound(self) -> None:
        """Measures what launches take the host, and leaves shapes that take the device no more."""
        if not self.shapes:  # limits of a few tokens leave none
            return
        self._launch_seconds = self._seconds(partial(self._rehearse, self.shapes[0]))
        limit = DEVICE_BOUND * self._launch_seconds
        for index, shape in enumerate(self.shapes):
            if shape[1] > SHORT_STEP and self._seconds(partial(self._rehearse, shape)) > limit:
                del self.shapes[index:]
                return

    def _seconds(self, work: Callable[[], object]) -> float:
        """What the slowest of the ranks takes: they have to choose alike."""
        return self._model.group.slowest(_seconds(work))

    def _write_inputs(self, shape: Shape, layout: StepLayout) -> None:
        surplus = shape[1] - layout.num_tokens
        self._write_rows(shape[0], layout.slots, layout.starts, [*layout.query_lens, surplus])

    def _write_rows(
        self, num_rows: int, slots: list[int], starts: list[int], query_lens: list[int]
    ) -> None:
        """Rows beyond ``slots`` are the null slot's, and those beyond ``query_lens`` empty."""
        surplus = num_rows - len(slots)
        inputs = array("q", slots)
        inputs.extend([self._state.null_slot] * surplus)
        inputs.extend(starts)
        inputs.extend([0] * (surplus + 1))  # the first row begins at 0, too
        inputs.extend(accumulate(query_lens))
        inputs.extend([inputs[-1]] * (num_rows - len(query_lens)))
        packed = np.frombuffer(inputs, dtype=np.int64)
        copy_to_device(packed, self._inputs[: len(packed)])

    def _rehearse(self, shape: Shape) -> None:
        self._write_rehearsal(shape)
        self._step(shape)

    def _write_rehearsal(self, shape: Shape) -> None:
        num_rows, num_tokens = shape
        # Spread over the rows: a single one could be longer than a request may be.
        each, rest = divmod(num_tokens, num_rows)
        lens = [each + 1] * rest + [each] * (num_rows - rest)
        self._write_rows(num_rows, [], [], lens)

    def _views(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """``slots, starts [R], cu_seqlens_q [R + 1]`` among the inputs."""
        slots, starts = self._inputs[: 2 * num_rows].chunk(2)
        return slots, starts, self._inputs[2 * num_rows : 3 * num_rows + 1]

    def _step(self, shape: Shape) -> None:
        num_rows, num_tokens = shape
        state, config = self._state, self._config
        slots, starts, cu_seqlens_q = self._views(num_rows)
        speculates = config.speculative_config is not None
        if speculates:  # the device knows where some rows begin
            last = state.last_positions[slots]
            starts = torch.where(starts < 0, last - starts + DEVICE_KNOWS, starts)
        token_ids, positions, seqlens_k, slot_mapping, block_table = ops.chunk_inputs(
            slots,
            starts,
            cu_seqlens_q,
            num_tokens,
            state.token_table,
            state.block_table,
            config.block_size,
            config.max_blocks_per_request,
        )
        # Lengths that make both kinds of attention take part: single tokens, and anything longer.
        # Beside a lone chunk there is the surplus only: the kernels for long rows take both.
        longest = min(num_tokens, config.max_model_len)
        shortest = 0 if num_rows <= LONE_ROWS else 1
        meta = AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            block_table=block_table,
            slot_mapping=slot_mapping,
            max_query_len=longest,
            max_seqlen_k=config.max_model_len,
            query_lens=(shortest,) * (num_rows - 1) + (longest,),
            context_lens=(config.max_model_len,) * num_rows,
            backend=config.attention_backend,
        )
        self._run_layers(token_ids, positions, meta)
        if speculates:
            self._contexts[:num_rows].copy_(seqlens_k)

    def _run_layers(self, token_ids: Tensor, positions: Tensor, meta: AttentionMetadata) -> None:
        """Leaves what ``run`` returns."""
        hidden = self._model(token_ids, positions, self._caches, meta, meta.last_tokens())
        self._hidden[: len(hidden)].copy_(hidden)


def _seconds(work: Callable[[], object]) -> float:
    """The faster of two runs of ``work``, to the end of what it launches."""
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)
