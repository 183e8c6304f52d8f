"""From logits to tokens, for the whole batch at once, on the device.

Stages, in order: penalties, logit bias, allowed tokens, bans (``min_tokens``, bad words),
temperature, top-k, top-p, min-p, draw. Rows that skip a stage are not touched by it, so a row
gets what it would get alone, whatever shares its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mini_infer.kernels import ops, sampling
from mini_infer.kernels.sampling import INTEGERS, REALS
from mini_infer.modeling.sampling_state import (
    ANY_TOKEN,
    EDITS,
    NO_LOGPROBS,
    Rows,
    SamplingState,
    Stage,
)
from mini_infer.modeling.token_logprobs import TokenLogprobTensors, token_logprobs
from mini_infer.modeling.upload import to_device

FEW_CANDIDATES = 256
"""Top-p usually keeps fewer tokens than this; on a CPU finding them costs a tenth of a sort."""

CACHED_LOGITS = 2**19
"""Logits that a CPU samples together. The draw makes some twenty passes over temporaries, which
are several times slower from main memory than from a cache."""

EDITED_LOGITS = 2**24
"""Logits that an accelerator edits together. It bounds the memory of copies and counts."""

LOGITS_PER_PAST_TOKEN = 5
"""Penalties take as much memory for a token of a row's past as for so many logits: without a bound
on both, long contexts would exceed what a profile with short ones found."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """``token_ids [R]`` int64 on the device; ``logprobs`` is None when no row asked for any."""

    token_ids: Tensor
    logprobs: TokenLogprobTensors | None = None


@dataclass(frozen=True, slots=True)
class UncertainRows:
    """How many tokens stand before each of R rows, where drafts of which nobody on the host knows
    the fate stand among them."""

    fewest: Rows
    """``[R]``, on the host: if none was accepted."""
    num_tokens: Tensor
    """``[R]`` int64, on the device: as it is."""


def draw(
    logits: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    state: SamplingState,
    token_table: Tensor | None = None,
) -> Tensor:
    """Draws ``[R]`` tokens on a GPU; writes each into its slot's row of ``token_table``, if given.

    Everything that depends on the rows is decided on the device, so a CUDA graph may hold this.
    What it does not know: see ``SamplingState.needs_edits``.

    Args:
        logits: ``[R, V]``, raw, any float dtype.
        slots: ``[R]`` int64; not written by a kernel of the same step.
        num_tokens: ``[R]`` integers: how many tokens stand before the one to sample.
        state: what each slot's request asked for.
        token_table: ``[slots, max_model_len]`` integers.
    """
    from mini_infer.kernels.triton.sampling import draw as draw_on_gpu  # needs Triton

    return draw_on_gpu(
        logits, slots, num_tokens, state.reals, state.integers, state.token_hashes, token_table
    )


def mask_(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """See ``sampling.mask_``."""
    if ops.runs_kernels(logits):
        from mini_infer.kernels.triton.token_masks import mask_ as on_gpu

        return on_gpu(logits, rows, masks)
    return sampling.mask_(logits, rows, masks)


def _concatenated(parts: list[SampleResult]) -> SampleResult:
    token_ids = torch.cat([part.token_ids for part in parts])
    logprobs = [part.logprobs for part in parts if part.logprobs]
    if not logprobs:
        return SampleResult(token_ids)
    return SampleResult(
        token_ids,
        TokenLogprobTensors(
            torch.cat([part.logprobs for part in logprobs]),
            torch.cat([part.ranks for part in logprobs]),
            torch.cat([part.top_token_ids for part in logprobs]),
            torch.cat([part.top_logprobs for part in logprobs]),
        ),
    )


class Sampler:
    """Samples the next token of every row. Holds nothing: all state is in the arguments.

    A row is a (slot, position) pair. Plain decoding has one row a slot; verifying k drafts has
    1 + k, which need nothing new here because each row's past is read from the token table.
    """

    def __call__(
        self,
        logits: Tensor,
        slots: Sequence[int] | Rows,
        num_tokens: Sequence[int] | Rows,
        token_table: Tensor,
        state: SamplingState,
        uncertain: UncertainRows | None = None,
    ) -> SampleResult:
        """Samples.

        Args:
            logits: ``[R, V]``, at least one row, raw, any float dtype; left as they are.
            slots: each row's slot, on the host. A slot may own several rows.
            num_tokens: how many tokens stand before the one to sample: its position.
            token_table: ``[slots, max_model_len]`` integers on the device.
            state: what each slot's request asked for.
            uncertain: given where ``num_tokens`` are upper bounds only.

        Returns:
            Ids in ``[0, V)``, always: a row of only -inf gives token 0, and NaN counts as the
            largest logit. Log-probabilities are those of the raw logits.
        """
        slots, num_tokens = np.asarray(slots), np.asarray(num_tokens)
        num_top = int(state.num_logprobs[slots].max())
        if not ops.runs_kernels(logits):
            logits = logits.float()
        fewest = num_tokens if uncertain is None else uncertain.fewest
        stages = state.active_stages(slots, fewest)
        at_once = self._rows_at_once(logits, stages, num_tokens)
        parts = []
        for first in range(0, len(slots), at_once):
            some = slice(first, first + at_once)
            rows = logits[some], slots[some], num_tokens[some], stages[some]
            batch = _Batch(*rows, token_table, state)
            if uncertain is not None:
                batch.device_num_tokens = uncertain.num_tokens[some]
            parts.append(self._sample(batch, num_top))
        return parts[0] if len(parts) == 1 else _concatenated(parts)

    def draw_drafts(
        self, logits: Tensor, slots: Tensor, num_tokens: Tensor, state: SamplingState
    ) -> Tensor:
        """Draws as the sampler would, but for edits: ``[R]`` ids of what will probably be sampled
        where ``num_tokens`` stand. All arguments are on the device, as for ``draw``."""
        if ops.runs_kernels(logits):
            return draw(logits, slots, num_tokens, state)
        rows = slots.cpu().numpy(), num_tokens.cpu().numpy()
        stages = state.active_stages(*rows)
        batch = _Batch(logits.float(), *rows, stages, logits.new_empty(0), state)
        return self._draw(batch, batch.logits)

    def _rows_at_once(self, logits: Tensor, stages: Rows, num_tokens: Rows) -> int:
        """Rows of ``logits [R, V]`` to sample together."""
        num_rows, width = logits.shape
        if logits.device.type == "cpu":
            return max(1, CACHED_LOGITS // width)
        if not (stages & EDITS).any():
            return num_rows
        if (stages & Stage.PENALTIES).any():
            width += LOGITS_PER_PAST_TOKEN * int(num_tokens.max())
        return max(1, EDITED_LOGITS // width)

    def _sample(self, batch: "_Batch", num_top: int) -> SampleResult:
        token_ids = self._draw(batch, self._edit(batch))
        if num_top == NO_LOGPROBS:
            return SampleResult(token_ids)
        rows = batch.rows(Stage.LOGPROBS)
        some = token_logprobs(batch.take(batch.logits, rows), batch.take(token_ids, rows), num_top)
        return SampleResult(token_ids, batch.spread(some, rows))

    def _edit(self, batch: "_Batch") -> Tensor:
        """Penalties, bias and masks: a copy of the logits if any row asks for one of them."""
        if not batch.union & EDITS:
            return batch.logits
        logits = batch.logits.to(torch.float32, copy=True)
        stages = (
            (Stage.PENALTIES, self._penalize_),
            (Stage.BIAS, self._bias_),
            (Stage.ALLOWED, self._allow_),
            (Stage.BANS, self._ban_),
        )
        for stage, apply in stages:
            rows = batch.rows(stage)
            if rows.size:
                logits = batch.put(logits, rows, apply(batch, batch.take(logits, rows), rows))
        return logits

    def _penalize_(self, batch: "_Batch", logits: Tensor, rows: Rows) -> Tensor:
        longest = int(batch.num_tokens[rows].max())
        return sampling.penalize_(
            logits,
            batch.token_table[batch.take(batch.device_slots, rows), :longest],
            batch.take(batch.device_num_tokens, rows),
            batch.integer("num_prompt_tokens", rows),
            batch.real("repetition", rows),
            batch.real("presence", rows),
            batch.real("frequency", rows),
        )

    def _bias_(self, batch: "_Batch", logits: Tensor, rows: Rows) -> Tensor:
        slots = batch.take(batch.device_slots, rows)
        return logits.scatter_add_(1, batch.state.bias_ids[slots], batch.state.bias_values[slots])

    def _allow_(self, batch: "_Batch", logits: Tensor, rows: Rows) -> Tensor:
        allowed = batch.state.allowed[batch.take(batch.device_slots, rows)]
        return logits.masked_fill_(~allowed, sampling.NEG_INF)

    def _ban_(self, batch: "_Batch", logits: Tensor, rows: Rows) -> Tensor:
        state, slots = batch.state, batch.take(batch.device_slots, rows)
        num_tokens = batch.take(batch.device_num_tokens, rows)[:, None]
        prefixes = state.ban_prefixes[slots]  # [R, W, D], the last token first
        place = num_tokens - 1 - torch.arange(prefixes.shape[-1], device=logits.device)
        tail = batch.token_table[slots[:, None], place.clamp_min(0)]  # [R, D]
        same = (prefixes == tail[:, None].to(prefixes.dtype)) & (place >= 0)[:, None]
        active = (same | (prefixes == ANY_TOKEN)).all(-1) & (num_tokens < state.ban_until[slots])
        return sampling.ban_(logits, state.ban_ids[slots], active)

    def _draw(self, batch: "_Batch", logits: Tensor) -> Tensor:
        if ops.runs_kernels(logits):
            return draw(logits, batch.device_slots, batch.device_num_tokens, batch.state)
        # Greedy, plain random and truncated rows go three ways and meet again.
        ways = (
            (batch.rows(Stage.RANDOM, Stage.NONE), self._draw_greedy),
            (batch.rows(Stage.RANDOM | Stage.TRUNCATE, Stage.RANDOM), self._draw_plain),
            (batch.rows(Stage.TRUNCATE), self._draw_truncated),
        )
        token_ids = torch.empty(len(batch.slots), dtype=torch.int64, device=logits.device)
        for rows, way in ways:
            if rows.size:
                drawn = way(batch, batch.take(logits, rows), rows)
                token_ids = batch.put(token_ids, rows, drawn)
        return token_ids

    def _draw_greedy(self, batch: "_Batch", logits: Tensor, rows: Rows) -> Tensor:
        return logits.argmax(-1)

    def _draw_plain(self, batch: "_Batch", logits: Tensor, rows: Rows) -> Tensor:
        scores = logits / batch.real("temperature", rows)[:, None]
        if batch.union & Stage.MIN_P:
            sampling.mask_min_p_(scores, batch.real("log_min_p", rows))
        noise = sampling.negative_gumbel(batch.state.token_hashes, *batch.noise_keys(rows))
        return scores.sub_(noise).argmax(-1)

    def _draw_truncated(self, batch: "_Batch", logits: Tensor, rows: Rows) -> Tensor:
        scores = logits / batch.real("temperature", rows)[:, None]
        top_k, top_p = batch.integer("top_k", rows), batch.real("top_p", rows, torch.float64)
        counts = batch.candidate_counts(rows)
        for num_candidates in counts:
            ids, kept, complete = sampling.truncate(scores, top_k, top_p, num_candidates)
            if num_candidates == counts[-1] or bool(complete.all()):
                break
        if batch.union & Stage.MIN_P:
            sampling.mask_min_p_(kept, batch.real("log_min_p", rows))
        noise = sampling.negative_gumbel(batch.state.token_hashes[ids], *batch.noise_keys(rows))
        return ids.gather(1, kept.sub_(noise).argmax(-1, keepdim=True))[:, 0]


class _Batch:
    """A step's rows: which of them asked for what, and their parameters on the device.

    Which rows take part in a stage is decided on the host. A stage that concerns the whole batch
    works on its tensors directly; one that concerns some rows works on a copy of those.
    """

    def __init__(
        self,
        logits: Tensor,
        slots: Rows,
        num_tokens: Rows,
        stages: Rows,
        token_table: Tensor,
        state: SamplingState,
    ) -> None:
        self.logits, self.token_table, self.state = logits, token_table, state
        self.slots, self.num_tokens, self.stages = slots, num_tokens, stages
        self.union = int(np.bitwise_or.reduce(self.stages, initial=0))

    def rows(self, stages: Stage, wanted: Stage | None = None) -> Rows:
        """Rows whose flags, of ``stages``, are ``wanted`` (by default all of them)."""
        return np.flatnonzero((self.stages & stages) == (stages if wanted is None else wanted))

    def take(self, tensor: Tensor, rows: Rows) -> Tensor:
        """``tensor``'s rows: itself if they are all of the batch's, otherwise a copy."""
        return tensor if rows.size == self.slots.size else tensor[self._on_device(rows)]

    def put(self, tensor: Tensor, rows: Rows, values: Tensor) -> Tensor:
        """``tensor`` with ``values`` in its ``rows``, in place unless they are all of them."""
        if rows.size == self.slots.size:
            return values
        return tensor.index_copy_(0, self._on_device(rows), values)

    def spread(self, some: TokenLogprobTensors, rows: Rows) -> TokenLogprobTensors:
        """``some`` rows' log-probabilities as the whole batch's, zeros elsewhere."""

        def whole(values: Tensor) -> Tensor:
            return self.put(values.new_zeros(self.slots.size, *values.shape[1:]), rows, values)

        return TokenLogprobTensors(
            whole(some.logprobs),
            whole(some.ranks),
            whole(some.top_token_ids),
            whole(some.top_logprobs),
        )

    def real(self, name: str, rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.take(self._reals, rows)[:, REALS.index(name)].to(dtype)

    def integer(self, name: str, rows: Rows) -> Tensor:
        return self.take(self._integers, rows)[:, INTEGERS.index(name)]

    def noise_keys(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return sampling.row_keys(
            self.integer("seed", rows), self.take(self.device_num_tokens, rows)
        )

    def candidate_counts(self, rows: Rows) -> list[int]:
        """How many of the likeliest tokens to look at: one guess after another, until enough.

        An accelerator must not be asked whether a guess was enough, so it sorts all.
        """
        vocab_size = self.logits.shape[-1]
        # Of a draft head's own vocabulary a request may keep more tokens than there are.
        largest_k = min(int(self.state.top_k[self.slots[rows]].max()), vocab_size)
        if not (self.stages[rows] & Stage.TOP_P_ALONE).any():
            return [largest_k]
        if self.logits.device.type != "cpu":
            return [vocab_size]
        counts = [max(FEW_CANDIDATES, largest_k)]
        while counts[-1] < vocab_size:
            counts.append(8 * counts[-1])
        return [min(count, vocab_size) for count in counts]

    @cached_property
    def device_slots(self) -> Tensor:
        return self._on_device(self.slots)

    @cached_property
    def device_num_tokens(self) -> Tensor:
        return self._on_device(self.num_tokens)

    @cached_property
    def _reals(self) -> Tensor:
        return self.state.reals[self.device_slots]

    @cached_property
    def _integers(self) -> Tensor:
        return self.state.integers[self.device_slots]

    def _on_device(self, values: Rows) -> Tensor:
        return to_device(values, self.logits.device)
