"""What the scheduler tells an executor. Frozen plain data: it may cross a process boundary."""

from dataclasses import dataclass
from typing import NamedTuple

from mini_infer.core.sampling_params import SamplingParams

IN_FLIGHT = -1
"""In place of a token: a step in flight samples it."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot of the device state: for the first time, or after a preemption."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    """Prompt plus the output known so far: the first row entries of the token table."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence and stop token ids, masked until ``params.min_tokens`` stand."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    block_ids: tuple[int, ...] = ()
    """Blocks that came with a prefix hit; blocks allocated this step are in the chunk."""


class Chunk(NamedTuple):
    """One request's share of a step: ``num_new_tokens`` tokens after the computed ones.

    A named tuple, as hundreds are built a step: a frozen dataclass takes three times as long.
    """

    request_id: str
    slot: int
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: tuple[int, ...] = ()
    """Appended to the slot's block table before the step runs."""
    samples: bool = True
    """The chunk reaches the request's last token, so its last row of logits is sampled."""
    num_drafts: int = 0
    """So many tokens at its end are drafts: they are verified, and each row of logits from the one
    before the first draft on is sampled."""
    draft_token_ids: tuple[int, ...] = ()
    """The drafts, where the host proposed them; else they stand in the device's token table."""
    start_known: bool = True
    """False while a step in flight verifies drafts of the request: then ``num_computed_tokens`` is
    what it is if all of them are accepted, and the device knows better."""
    num_proposed: int = 0
    """Drafts that the device shall propose behind what the chunk samples, for the next step."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step: a list of (request, how many new tokens), in a fixed order.

    The order is decided once, here, so that every rank of a parallel executor builds the same rows.
    """

    step_id: int
    chunks: tuple[Chunk, ...]
    admissions: tuple[Admission, ...] = ()
    masked: tuple[int, ...] = ()
    """Chunks that sample under a grammar, ascending. Such a step is submitted without its masks,
    and samples nothing before ``StepHandle.sample`` brings them."""
    first_token_ids: tuple[int, ...] = ()
    """Of each chunk, the token that it starts with, where the first stage of a pipeline has to be
    told what the last one sampled: ``IN_FLIGHT`` where the host does not know yet, and the last
    stage itself tells. () where one device knows."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_new_tokens for chunk in self.chunks)

    @property
    def mask_rows(self) -> dict[int, range]:
        """Of each masked chunk, its rows among the masks: one, and one more for each draft."""
        rows: dict[int, range] = {}
        end = 0
        for index in self.masked:
            start, end = end, end + 1 + self.chunks[index].num_drafts
            rows[index] = range(start, end)
        return rows
