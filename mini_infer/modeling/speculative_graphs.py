"""Steps with drafts as CUDA graphs: verification, and what comes behind it.

Such a step is two replays. The first computes and samples each row's last known token and the
drafts behind it (``VerifyGraphs``). The second keeps the drafts that are what was sampled, and lets
a proposer on the device draft the next ones (``ProposeGraphs``). Between them the host may sample
anew where a request edits its logits, which no graph can.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.speculative_config import MAX_DRAFTS, MAX_SPECULATING_ROWS
from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.cuda_graphs import record
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.proposer import DeviceProposer, DraftRows
from mini_infer.modeling.sampler import draw
from mini_infer.modeling.speculative_step import StepRows
from mini_infer.modeling.step_layout import StepLayout
from mini_infer.modeling.upload import copy_to_device

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)

Shape = tuple[int, int]
"""Rows of a graph, and the drafts that it verifies or proposes for each."""


def row_sizes(config: EngineConfig) -> list[int]:
    """Numbers of rows that get graphs, ascending; none without speculation, and none in a pipeline,
    where what comes from the stage before has no gaps for drafts that a row has not."""
    if config.speculative_config is None or config.is_pipelined:
        return []
    most = min(config.max_num_seqs, MAX_SPECULATING_ROWS)
    return [rows for rows in ROWS if rows < most] + [most]


def most_samples(config: EngineConfig) -> int:
    """Places that a step of these graphs samples, at most."""
    sizes = row_sizes(config)
    if config.speculative_config is None or not sizes:
        return 0
    return sizes[-1] * (1 + config.speculative_config.num_speculative_tokens)


def shapes_of(config: EngineConfig, counts: Sequence[int]) -> list[Shape]:
    """Every number of rows with every number of drafts, the largest last."""
    shapes = [(rows, count) for rows in row_sizes(config) for count in counts]
    return sorted(shapes, key=lambda shape: (shape[0] * (1 + shape[1]), shape[0]))


def smallest(shapes: Sequence[Shape], num_rows: int, num_drafts: int) -> Shape | None:
    """The first shape that holds so many of both, with no more drafts than it needs."""
    fitting = [shape for shape in shapes if shape[0] >= num_rows and shape[1] >= num_drafts]
    return min(fitting, key=lambda shape: (shape[1], shape[0]), default=None)


@dataclass(frozen=True, slots=True)
class SampledPlaces:
    """What a step leaves for its end: N places that it sampled, and one more, which is nobody's.

    The next step overwrites it.
    """

    token_ids: Tensor
    """``[N + 1]`` int64."""
    places: Tensor
    """``[N + 1]`` int64: where in their requests they stand."""
    hidden: Tensor
    """``[N + 1, hidden]``: the residual stream that they come from."""

    @classmethod
    def empty(
        cls, config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> "SampledPlaces":
        """Room for the largest step."""
        count, size = most_samples(config) + 1, config.model_config.hidden_size
        return cls(
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros(count, size, dtype=dtype, device=device),
        )

    @property
    def nobodys(self) -> int:
        """The place for surplus rows: the first of the null slot."""
        return len(self.places) - 1

    def fill(self, token_ids: Tensor, places: Tensor, hidden: Tensor) -> None:
        """Takes in what was sampled."""
        count = len(token_ids)
        self.token_ids[:count].copy_(token_ids)
        self.places[:count].copy_(places)
        self.hidden[:count].copy_(hidden)


class ShapedGraphs(ABC):
    """Graphs by rows and drafts, whose inputs are a few integers a row."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        surplus: Sequence[int],
        device: torch.device,
        pool: "_POOL_HANDLE",
    ) -> None:
        """``surplus`` are the integers of a row that is nobody's."""
        self.shapes = shapes
        self._most_rehearsed = MAX_DRAFTS
        self._surplus, self._pool = surplus, pool
        most_rows = max((num_rows for num_rows, _ in shapes), default=0)
        self._inputs = torch.zeros(len(surplus) * most_rows, dtype=torch.int64, device=device)
        self._written: tuple[Shape, tuple[list[int], ...]] | None = None
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def capture(self, shapes: Sequence[Shape] | None = None) -> None:
        """Records the graphs, by default all, the largest first. Their kernels run, for nobody."""
        for shape in reversed(self.shapes if shapes is None else shapes):
            self._write(shape)
            self._graphs[shape] = record(partial(self._step, shape), self._pool)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launches the steps of all shapes that launch kernels of their own once, for nobody, and
        records nothing."""
        for shape in self.shapes:
            if shape[1] <= self._most_rehearsed:
                self._write(shape)
                self._step(shape)

    def replay(self, shape: Shape, *columns: list[int]) -> None:
        """Replays a step of rows with these integers; the other rows are nobody's."""
        wanted = shape, columns
        if wanted != self._written:  # else the inputs are still in place
            self._written = None  # where Ctrl-C cuts the upload short
            self._write(shape, *columns)
            self._written = wanted
        self._graphs[shape].replay()

    def _write(self, shape: Shape, *columns: list[int]) -> None:
        inputs = np.empty((len(self._surplus), shape[0]), dtype=np.int64)
        inputs[:] = np.array(self._surplus)[:, None]
        for row, column in zip(inputs, columns, strict=False):
            row[: len(column)] = column
        copy_to_device(inputs.reshape(-1), self._inputs[: inputs.size])

    def _columns(self, shape: Shape) -> Tensor:
        """``[columns, rows]`` int64, what stands in the inputs."""
        return self._inputs[: len(self._surplus) * shape[0]].view(-1, shape[0])

    @abstractmethod
    def _step(self, shape: Shape) -> None:
        """Launches what a graph of ``shape`` holds."""


class VerifyGraphs(ShapedGraphs):
    """Graphs of model, head and sampler for steps of one token and equally many drafts a row.

    A row with fewer drafts has surplus tokens, which stand behind its others and so change none of
    them; where its blocks have no room for these, they go to the null block.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Sequence[KVCache],
        state: DeviceState,
        logits: Tensor,
        sampled: SampledPlaces,
        pool: "_POOL_HANDLE",
    ) -> None:
        """``logits [N, vocab]`` and ``sampled`` are where graphs leave what they compute."""
        speculation = config.speculative_config
        counts = () if speculation is None else speculation.draft_counts
        super().__init__(shapes_of(config, counts), (state.null_slot, 0), state.device, pool)
        self._model, self._caches, self._state = model, caches, state
        self._logits, self._sampled = logits, sampled
        self._backend = config.attention_backend
        ends = torch.arange(max(row_sizes(config), default=0) + 1, device=state.device)
        self._cu_seqlens_q = {1 + count: ends * (1 + count) for count in counts}

    def shape_for(self, layout: StepLayout) -> Shape | None:
        """The graph of a step that speculates; None where there is none: it has chunks of prompts,
        or too many rows."""
        counts = layout.num_drafts
        if len(counts) != layout.num_rows or layout.num_tokens != len(counts) + sum(counts):
            return None
        return smallest(self.shapes, layout.num_rows, max(counts))

    def run(self, shape: Shape, layout: StepLayout) -> StepRows:
        """Replays a step: ``1 + shape[1]`` rows of each of its requests.

        Nothing is accepted yet: what was drawn does not stand in the token table. The next step
        overwrites all of it.
        """
        self.replay(shape, layout.slots, layout.device_starts())
        sampled, width = self._sampled, 1 + shape[1]
        count = layout.num_rows * width
        return StepRows(
            sampled.hidden[:count],
            self._logits[:count],
            sampled.places[:count],
            list(range(0, count, width)),
            sampled.token_ids[:count],
        )

    def _step(self, shape: Shape) -> None:
        num_rows, width = shape[0], 1 + shape[1]
        state = self._state
        slots, starts = self._columns(shape)
        longest = state.token_table.shape[1]
        inputs = ops.verify_inputs(
            slots,
            starts,
            width,
            state.token_table,
            state.block_table,
            state.last_positions,
            state.kv_limits.view(-1),
            state.block_size,
            state.block_table.shape[1],
            state.null_block,
        )
        meta = AttentionMetadata(
            cu_seqlens_q=self._cu_seqlens_q[width][: num_rows + 1],
            seqlens_k=inputs.seqlens_k,
            block_table=inputs.block_table,
            slot_mapping=inputs.slot_mapping,
            max_query_len=width,
            max_seqlen_k=longest,
            query_lens=(width,) * num_rows,
            context_lens=(longest,) * num_rows,
            backend=self._backend,
        )
        x = self._model(inputs.token_ids, inputs.positions, self._caches, meta)
        logits = self._model.compute_logits(x, out=self._logits[: num_rows * width])
        token_ids = draw(logits, inputs.token_slots, inputs.sampled_positions, state.sampling)
        self._sampled.fill(token_ids, inputs.sampled_positions, x)


class ProposeGraphs(ShapedGraphs):
    """Graphs that accept drafts and propose the next ones, behind any step that sampled: one of
    ``VerifyGraphs`` or another."""

    def __init__(
        self,
        config: EngineConfig,
        state: DeviceState,
        proposer: DeviceProposer | None,
        sampled: SampledPlaces,
        pool: "_POOL_HANDLE",
    ) -> None:
        """``proposer`` is None where drafts come from the host."""
        speculation = config.speculative_config
        self._method = "" if speculation is None else speculation.method
        counts: tuple[int, ...] = () if speculation is None else speculation.draft_counts
        shapes = shapes_of(config, counts if proposer is not None else counts[:1])
        super().__init__(shapes, (state.null_slot, 0, sampled.nobodys), state.device, pool)
        if not getattr(proposer, "drafts_at_once", False):
            self._most_rehearsed = 2  # what proposes a third draft proposed the second
        self._state, self._proposer, self.sampled = state, proposer, sampled
        # What the kernels of a graph write to is its own, as long as somebody holds it.
        self._results: dict[Shape, tuple[Tensor, Tensor | None]] = {}

    def capture(self, shapes: Sequence[Shape] | None = None) -> None:
        """See ``ShapedGraphs.capture``.

        Raises:
            InvalidConfigError: a user's own proposer does what no graph can hold.
        """
        try:
            super().capture(shapes)
        except torch.AcceleratorError as error:
            if ":" not in self._method:
                raise
            reason = str(error).partition("\n")[0]
            raise InvalidConfigError(
                f"speculative_config: {self._method} can't be recorded as a CUDA graph ({reason}): "
                f"it must not ask the host for values of tensors; or set enforce_eager"
            ) from error

    def shape_for(self, layout: StepLayout) -> Shape | None:
        """The graph for the sampled chunks of a step that speculates; None where they are too
        many."""
        return smallest(self.shapes, len(layout.sampled), max(layout.num_proposed))

    def run(
        self, shape: Shape, layout: StepLayout, first_samples: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Accepts drafts of R sampled chunks, whose samples begin at ``first_samples`` of what
        ``sampled`` holds, and proposes ``shape[1]`` new ones.

        Returns how many each chunk accepts ``[R]``, and its next drafts ``[R, shape[1]]``, if any,
        which stand in the token table, too. The next step overwrites both.
        """
        slots = [layout.slots[index] for index in layout.sampled]
        self.replay(shape, slots, layout.num_drafts, first_samples)
        num_accepted, drafts = self._results[shape]
        return num_accepted[: len(slots)], drafts if drafts is None else drafts[: len(slots)]

    def _step(self, shape: Shape) -> None:
        num_proposed = shape[1]
        state, sampled = self._state, self.sampled
        slots, num_drafts, first = self._columns(shape)
        num_accepted = ops.accept_drafts_(
            sampled.token_ids,
            first,
            num_drafts,
            slots,
            sampled.places.index_select(0, first),
            state.token_table,
            state.last_positions,
        )
        drafts = None
        if num_proposed:
            assert self._proposer is not None
            token_ids, positions, hidden = ops.last_samples(
                first, num_accepted, sampled.token_ids, sampled.places, sampled.hidden
            )
            rows = DraftRows(slots, positions, token_ids, hidden)
            drafts = self._proposer.propose(rows, num_proposed)
            ops.write_drafts_(state.token_table, slots, positions, drafts)
        self._results[shape] = num_accepted, drafts
