"""What comes out: per step for machines, per request for people. Names follow vLLM's."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mini_infer.core.draft_counts import DraftCounts

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token that stands there, and the likeliest ones.

    ``rank`` is 1 for the likeliest token of the vocabulary. ``top`` is ordered, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one step; every tuple has one entry per chunk of the ``ScheduledBatch``."""

    token_ids: tuple[tuple[int, ...], ...]
    """Sampled (and accepted) tokens; empty for a chunk that does not reach its request's end."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Aligned with ``token_ids``; () for chunks that asked for none, or () as a whole."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Of the prompt tokens *predicted* by the chunk's positions; () where not asked for."""
    draft_token_ids: tuple[tuple[int, ...], ...] = ()
    """What the device proposed behind each chunk; () as a whole where nobody has to know."""


class RequestUpdate(NamedTuple):
    """What one step meant for one request: the scheduler's answer, still without text.

    A request that is ``told_at_end`` gets one, with all that it generated.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    new_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """All of the prompt's, once, with the first token; the first entry is None."""
    time: float | None = None
    """When the result of the step that sampled ``new_token_ids`` was taken in, on the clock of the
    events; None for a request that is ``told_at_end``, of which ``Finished`` tells it."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position, ready to show."""

    logprob: float
    rank: int | None
    decoded_token: str
    bytes: tuple[int, ...] = ()
    """The token's own UTF-8 bytes, also when they are not a whole character."""


@dataclass(slots=True)
class RequestMetrics:
    """Monotonic times in seconds (``time.monotonic``) of one request's milestones."""

    queued_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    drafts: DraftCounts | None = None
    """How speculation fared, over all choices: acceptance, accepted length, speed-up. None where no
    draft was verified."""

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.queued_time


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` choices."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request with all its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finished: bool = True


@dataclass(slots=True)
class RequestDelta:
    """What is new for one choice of one request since its last delta.

    A request that is not streamed has one delta per choice, its last, with the whole choice. Not
    frozen, as hundreds are built a step: that would take five times as long.

    In each of ``logprobs``, the token that stands there comes first, then the likeliest ones.

    The joined ``text`` of a choice's deltas equals its ``CompletionOutput.text``; text that could
    still turn into a stop string is held back. ``finish_reason`` is set on a choice's last delta,
    ``output`` on the last delta of the whole request.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With a request's first delta, when asked for."""
    output: RequestOutput | None = None
