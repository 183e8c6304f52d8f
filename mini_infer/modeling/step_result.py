"""From a step's device tensors to a ``StepOutput``, once, when somebody asks for it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.errors import EngineDeadError
from mini_infer.core.outputs import StepOutput, TokenLogprobs
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.sampler import SampleResult
from mini_infer.modeling.token_logprobs import TokenLogprobTensors, token_logprobs

ROWS_AT_ONCE = 128
"""Rows of logits that prompt log-probabilities hold at a time: bounds memory, not speed."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Log-probabilities of some of the prompt tokens that one chunk predicts, in order."""

    chunk: int
    num_top: int
    targets: Tensor
    logprobs: TokenLogprobTensors


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """Which of a step's samples count: of each sampled chunk those of the accepted drafts, and the
    one behind them."""

    first_samples: Sequence[int]
    """``[R]``: where each sampled chunk's samples begin."""
    num_accepted: Tensor
    """``[R]``"""
    num_proposed: Sequence[int] = ()
    """``[R]``, with ``drafts``: how many of them the next step may verify."""
    drafts: Tensor | None = None
    """``[R, k]``, where somebody on the host has to know them."""


def compute_prompt_rows(
    batch: ScheduledBatch,
    first_rows: Sequence[int],
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    state: DeviceState,
) -> list[PromptRows]:
    """For chunks that asked: the log-probability of each prompt token that a position predicts."""
    rows: list[PromptRows] = []
    for index, chunk in enumerate(batch.chunks):
        num_top = state.params_by_slot[chunk.slot].prompt_logprobs
        start = chunk.num_computed_tokens
        end = min(start + chunk.num_new_tokens, state.num_prompt_tokens[chunk.slot] - 1)
        if num_top is None:
            continue
        for first in range(start, end, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, end)
            row = first_rows[index] + first - start
            logits = compute_logits(hidden[row : row + last - first])
            targets = state.token_table[chunk.slot, first + 1 : last + 1]
            logprobs = token_logprobs(logits, targets, num_top)
            rows.append(PromptRows(index, num_top, targets, logprobs))
    return rows


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory that is complete once the device gets there; a CPU's tensor itself.

    The step after this one may overwrite the original: copies and kernels run in order.
    """
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@contextmanager
def device_failures() -> Iterator[None]:
    """After an illegal access or a failed assertion, a device refuses all further work of this
    process: no step will succeed any more, so nobody should send one.

    Raises:
        EngineDeadError: in place of such an error.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        first_line = str(error).partition("\n")[0]
        raise EngineDeadError(f"the device failed ({first_line}): restart the engine") from error


class LocalStep:
    """A step that this process launched; ``result`` waits until the device has run it.

    The copies to the host are queued at once, behind the step and before the next one.
    """

    def __init__(
        self,
        batch: ScheduledBatch,
        params_by_slot: dict[int, SamplingParams],
        sampled: SampleResult | None,
        prompt_rows: Sequence[PromptRows],
        device: torch.device,
        verified: VerifiedRows | None = None,
    ) -> None:
        self._batch = batch
        self._sampled = self._num_top = self._verified = None
        if sampled is not None:
            logprobs = sampled.logprobs
            if logprobs is not None:
                self._num_top = [
                    params_by_slot[chunk.slot].logprobs
                    for chunk in batch.chunks
                    if chunk.samples
                    for _ in range(1 + chunk.num_drafts)
                ]
                logprobs = _on_host(logprobs)
            self._sampled = SampleResult(to_host(sampled.token_ids), logprobs)
        if verified is not None:
            self._verified = replace(
                verified,
                num_accepted=to_host(verified.num_accepted),
                drafts=None if verified.drafts is None else to_host(verified.drafts),
            )
        self._prompt_rows = [
            replace(rows, targets=to_host(rows.targets), logprobs=_on_host(rows.logprobs))
            for rows in prompt_rows
        ]
        # Also of a step that samples nothing: it may bring a prompt's log-probabilities, and steps
        # that nobody waits for would pile up on the device, ahead of whoever arrives next.
        self._done = torch.cuda.current_stream().record_event() if device.type == "cuda" else None

    def result(self) -> StepOutput:
        """Token ids and log-probabilities, aligned with the batch's chunks.

        Raises:
            EngineDeadError: the device failed, and with it everything that this process has there.
        """
        if self._done is not None:
            with device_failures():
                self._done.synchronize()
        chunks = self._batch.chunks
        tokens: list[tuple[int, ...]] = [()] * len(chunks)
        logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(chunks)
        if self._sampled is not None:
            token_ids = self._sampled.token_ids.tolist()
            entries: list[TokenLogprobs | None] = []
            if self._sampled.logprobs is not None and self._num_top is not None:
                entries = read_logprobs(
                    self._sampled.token_ids, self._sampled.logprobs, self._num_top
                )
            sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
            for index, kept in zip(sampling, self._rows(len(sampling)), strict=True):
                tokens[index] = tuple(token_ids[kept])
                logprobs[index] = tuple(entry for entry in entries[kept] if entry is not None)
        prompt: list[tuple[TokenLogprobs, ...]] = [()] * len(chunks)
        for rows in self._prompt_rows:
            asked: list[int | None] = [rows.num_top] * len(rows.targets)
            found = read_logprobs(rows.targets, rows.logprobs, asked)
            prompt[rows.chunk] += tuple(entry for entry in found if entry is not None)
        return StepOutput(
            tuple(tokens),
            tuple(logprobs) if any(logprobs) else (),
            tuple(prompt) if self._prompt_rows else (),
            self._drafts(),
        )

    def _rows(self, num_sampled: int) -> Iterator[slice]:
        """The samples that each sampled chunk keeps."""
        if self._verified is None:
            yield from (slice(row, row + 1) for row in range(num_sampled))
            return
        verified = self._verified
        for first, count in zip(
            verified.first_samples, verified.num_accepted.tolist(), strict=True
        ):
            yield slice(first, first + count + 1)

    def _drafts(self) -> tuple[tuple[int, ...], ...]:
        """What stands behind each chunk, where that was asked for."""
        if self._verified is None or self._verified.drafts is None:
            return ()
        counts = iter(self._verified.num_proposed)
        drafts = iter(self._verified.drafts.tolist())
        return tuple(
            tuple(next(drafts)[: next(counts)]) if chunk.samples else ()
            for chunk in self._batch.chunks
        )


class MaskedStep:
    """A step that was launched but for its sampling, until its masks are known."""

    def __init__(self, go_on: "Callable[[bytearray], LocalStep | MaskedStep]") -> None:
        self._go_on = go_on
        self._step: LocalStep | MaskedStep | None = None

    def sample(self, masks: bytearray) -> None:
        """Launches the rest, under a row of bits for each masked chunk."""
        self._step = self._go_on(masks)

    def result(self) -> StepOutput:
        """See ``LocalStep.result``."""
        assert self._step is not None, "its masks come first"
        return self._step.result()


def _on_host(columns: TokenLogprobTensors) -> TokenLogprobTensors:
    return TokenLogprobTensors(
        to_host(columns.logprobs),
        to_host(columns.ranks),
        to_host(columns.top_token_ids),
        to_host(columns.top_logprobs),
    )


def read_logprobs(
    token_ids: Tensor, columns: TokenLogprobTensors, num_top: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """One entry per row, trimmed to what the row asked; None for a row that asked nothing."""
    rows = zip(
        num_top,
        token_ids.tolist(),
        columns.logprobs.tolist(),
        columns.ranks.tolist(),
        columns.top_token_ids.tolist(),
        columns.top_logprobs.tolist(),
        strict=True,
    )
    return [
        None
        if count is None
        else TokenLogprobs(
            token_id, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True))
        )
        for count, token_id, logprob, rank, ids, values in rows
    ]
