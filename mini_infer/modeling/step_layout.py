"""What the host knows of a step's rows: plain lists, made once from a ``ScheduledBatch``."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mini_infer.core.batch import ScheduledBatch

Integers = NDArray[np.int64]
DEVICE_KNOWS = -1
"""As a row's start: its request's last token, of which only the device knows where it stands. So
many less, so many tokens behind it."""


@dataclass(frozen=True)
class StepLayout:
    """R chunks (rows) with T tokens in all, one behind the other in their scheduled order."""

    slots: list[int]
    starts: list[int]
    """Per chunk, the position of its first token."""
    query_lens: list[int]
    first_rows: list[int]
    """``[R + 1]``: where each chunk's tokens begin among the step's; then T."""
    sampled: list[int]
    """Chunks whose last token's logits are sampled, and those of the tokens before their drafts."""
    speculates: bool = False
    """Some chunk verifies drafts, or starts where only the device knows, or has some proposed."""
    num_drafts: list[int] = field(default_factory=list)
    """Of each sampled chunk, in a step that speculates."""
    num_proposed: list[int] = field(default_factory=list)
    """Likewise."""
    uncertain: list[bool] = field(default_factory=list)
    """Chunks that may start before ``starts``, where the host does not know."""

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "StepLayout":
        """The rows of ``batch``, in its order."""
        chunks = batch.chunks
        first_rows = [0]
        for chunk in chunks:
            first_rows.append(first_rows[-1] + chunk.num_new_tokens)
        layout = cls(
            slots=[chunk.slot for chunk in chunks],
            starts=[chunk.num_computed_tokens for chunk in chunks],
            query_lens=[chunk.num_new_tokens for chunk in chunks],
            first_rows=first_rows,
            sampled=[index for index, chunk in enumerate(chunks) if chunk.samples],
        )
        if not any(c.num_drafts or c.num_proposed or not c.start_known for c in chunks):
            return layout
        return replace(
            layout,
            speculates=True,
            num_drafts=[chunks[index].num_drafts for index in layout.sampled],
            num_proposed=[chunks[index].num_proposed for index in layout.sampled],
            uncertain=[not chunk.start_known for chunk in chunks],
        )

    def starting_at(self, starts: list[int]) -> "StepLayout":
        """The same rows where all starts are known to be these."""
        return replace(self, starts=starts, uncertain=[False] * len(starts))

    def device_starts(self) -> list[int]:
        """Per chunk its start, or ``DEVICE_KNOWS``."""
        rows = zip(self.starts, self.uncertain, strict=True)
        return [DEVICE_KNOWS if uncertain else start for start, uncertain in rows]

    def with_drafts_as_rows(self) -> "StepLayout":
        """The same tokens where each draft is a row of its own, behind those of its request, and
        its last token is what every sampled row samples from."""
        counts = dict(zip(self.sampled, self.num_drafts, strict=True))
        slots: list[int] = []
        starts: list[int] = []
        query_lens: list[int] = []
        sampled: list[int] = []
        for index, start in enumerate(self.device_starts()):
            count = counts.get(index, 0)
            known = self.query_lens[index] - count
            if index in counts:
                sampled += range(len(slots), len(slots) + 1 + count)
            slots += [self.slots[index]] * (1 + count)
            query_lens += [known] + [1] * count
            behind = range(known, known + count)
            starts += [start, *(start - j if start < 0 else start + j for j in behind)]
        return StepLayout(slots, starts, query_lens, [0, *accumulate(query_lens)], sampled)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return self.first_rows[-1]

    @property
    def is_decode(self) -> bool:
        """One token a row, each of them sampled, and no drafts before or behind."""
        return self.num_tokens == self.num_rows == len(self.sampled) and not self.speculates

    @cached_property
    def context_lens(self) -> list[int]:
        """Per chunk, the tokens up to its last one."""
        return [start + new for start, new in zip(self.starts, self.query_lens, strict=True)]

    @cached_property
    def last_tokens(self) -> Integers:
        """Per chunk, which of the step's tokens is its last."""
        return np.array(self.first_rows[1:], dtype=np.int64) - 1

    @cached_property
    def sampled_tokens(self) -> Integers:
        """Which of the step's tokens have their logits sampled: per sampled chunk the last one, and
        as many before it as there are drafts."""
        counts = self.num_drafts or [0] * len(self.sampled)
        rows = zip(self.sampled, counts, strict=True)
        return np.array(
            [
                token
                for index, count in rows
                for token in range(
                    self.first_rows[index + 1] - count - 1, self.first_rows[index + 1]
                )
            ],
            dtype=np.int64,
        )

    @cached_property
    def sampling_slots(self) -> Integers:
        slots = np.array([self.slots[index] for index in self.sampled], dtype=np.int64)
        return np.repeat(slots, self._samples_by_chunk) if self.speculates else slots

    @cached_property
    def sampling_positions(self) -> Integers:
        """Where the sampled tokens will stand; at most, for chunks that are ``uncertain``."""
        ends = np.array([self.context_lens[index] for index in self.sampled], dtype=np.int64)
        if not self.speculates:
            return ends
        tokens = self.sampled_tokens
        last = np.array([self.first_rows[index + 1] - 1 for index in self.sampled], dtype=np.int64)
        counts = self._samples_by_chunk
        return np.repeat(ends, counts) - (np.repeat(last, counts) - tokens)

    def rows_of(self, chunks: Sequence[int]) -> Integers:
        """Where the samples of some sampled chunks are among the step's."""
        if not self.speculates:
            return np.searchsorted(self.sampled, chunks)
        ends = np.cumsum(self._samples_by_chunk)
        which = np.searchsorted(self.sampled, chunks)
        counts = self._samples_by_chunk
        return np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in which])

    @property
    def _samples_by_chunk(self) -> Integers:
        return np.array(self.num_drafts, dtype=np.int64) + 1
