"""One mutable object for a request's whole life. Its progress is ``num_computed_tokens``."""

from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Protocol

from mini_infer.core.outputs import FinishReason, TokenLogprobs
from mini_infer.core.sampling_params import SamplingParams

Rank = tuple[tuple[float, ...], int]
"""Place in the queues: the scheduling policy's key, then the order of arrival; smaller first."""


class RequestState(IntEnum):
    """The scheduler's four queues, and the end. An integer, as its hash is looked up a dozen times
    a step: that of a plain ``Enum`` is computed in Python."""

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class OutputGrammar(Protocol):
    """Where an output is in the grammar that it is held to."""

    def accept(self, token_id: int) -> str | None:
        """Moves on by one token; says why where that is not possible."""

    @property
    def complete(self) -> bool:
        """True when no further text can follow."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """A prompt, what was generated from it so far, and how much of both has KV.

    ::

        prompt tokens                        output tokens   in flight
        |----------- computed -----------|---- new this step ----|
        0                     num_computed_tokens        + num_new_tokens

    ``token_ids`` is prompt + known output. ``num_in_flight_tokens`` counts output tokens that a
    submitted step will sample but whose ids the host has not seen; they exist in the device's
    token table, so the next step can be scheduled over them (pipeline depth 2).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """The noise of this request; drawn at admission when the caller gave none."""
    max_tokens: int
    """``params.max_tokens`` clipped to the context."""
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    arrival: int = 0
    """Order of arrival, unique per scheduler."""
    priority: int = 0
    """Lower runs first under the ``priority`` policy."""
    cache_salt: str = ""
    told_at_end: bool = False
    """Nobody reads its tokens before it ends: it gets one ``RequestUpdate``, with all of them."""
    grammar: OutputGrammar | None = None
    """Stands behind the known tokens, also while the request is preempted."""

    stop_token_ids: frozenset[int] = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)
    """Tokens that may end it: ``stop_token_ids``, and those of end of sequence unless ignored."""
    max_num_tokens: int = field(init=False)
    """Prompt + ``max_tokens``."""
    rank: Rank = ((), 0)
    """Constant from its arrival on, so that queues stay in order."""
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_in_flight_steps: int = 0
    num_in_flight_drafts: int = 0
    """Drafts that steps in flight verify: in ``num_in_flight_tokens`` and ``num_computed_tokens``
    they count as accepted, until the host knows."""
    num_drafts: int = 0
    """Drafts that the last submitted step leaves for it on the device."""
    draft_token_ids: tuple[int, ...] = ()
    """Those, once the host knows them and has to, for a grammar's masks."""
    num_cached_tokens: int | None = None
    """Prefix-cache hit at first admission; None before it."""
    num_preemptions: int = 0
    slot: int = -1
    """Row of the device's token table; -1 while not admitted."""
    kv_capacity: int = 0
    """Tokens that its KV blocks hold; kept by ``KVCacheManager``."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of ``token_ids``, extended as they fill."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    first_token_time: float | None = None
    last_token_time: float | None = None
    """Of the clock of the events: when the results of the steps that sampled them were taken in."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        ignored = self.params.ignore_eos
        self.end_token_ids = self.stop_token_ids | (frozenset() if ignored else self.eos_token_ids)
        self.max_num_tokens = len(self.prompt_token_ids) + self.max_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, on the host or in flight."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED
