"""What the host knows of a step's rows: plain lists, made once from a ``ScheduledBatch``."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mini_infer.core.batch import ScheduledBatch

Integers = NDArray[np.int64]


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
    """Chunks whose last token's logits are sampled."""

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "StepLayout":
        """The rows of ``batch``, in its order."""
        chunks = batch.chunks
        first_rows = [0]
        for chunk in chunks:
            first_rows.append(first_rows[-1] + chunk.num_new_tokens)
        return cls(
            slots=[chunk.slot for chunk in chunks],
            starts=[chunk.num_computed_tokens for chunk in chunks],
            query_lens=[chunk.num_new_tokens for chunk in chunks],
            first_rows=first_rows,
            sampled=[index for index, chunk in enumerate(chunks) if chunk.samples],
        )

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return self.first_rows[-1]

    @property
    def is_decode(self) -> bool:
        """One token a row, each of them sampled."""
        return self.num_tokens == self.num_rows == len(self.sampled)

    @cached_property
    def context_lens(self) -> list[int]:
        """Per chunk, the tokens up to its last one."""
        return [start + new for start, new in zip(self.starts, self.query_lens, strict=True)]

    @cached_property
    def last_tokens(self) -> Integers:
        """Per chunk, which of the step's tokens is its last."""
        return np.array(self.first_rows[1:], dtype=np.int64) - 1

    @cached_property
    def sampling_slots(self) -> Integers:
        return np.array([self.slots[index] for index in self.sampled], dtype=np.int64)

    @cached_property
    def sampling_positions(self) -> Integers:
        """Where the sampled tokens will stand."""
        return np.array([self.context_lens[index] for index in self.sampled], dtype=np.int64)
