"""What a caller asks of one request's sampling. Field names follow vLLM's."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_TOKENS_PER_BAD_WORD = 16
"""The last four bound what a slot of the device's sampling tables takes."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when a request ends.

    The order of operations is: the mask of ``structured_outputs``, penalties (repetition over
    prompt + output; presence and frequency over output), ``logit_bias``, ``allowed_token_ids``/
    ``bad_words``/``min_tokens`` masks, ``temperature``, ``top_k``, ``top_p``, ``min_p``.

    Raises:
        InvalidRequestError: a value out of range; ``param`` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this mass."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """With a seed a request's output does not depend on what shares its batch."""
    max_tokens: int | None = 16
    """None: up to the model's context."""
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities, before temperature, of the sampled token and of this many likeliest."""
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    """Words that are never completed: their last token is masked once the others stand. At most
    ``MAX_BAD_WORDS``, of at most ``MAX_TOKENS_PER_BAD_WORD`` tokens each."""
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1: as many as leave room for the output."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output is held to. Tokens that would leave it are masked before all else,
    so log-probabilities are those of what is allowed; the request ends where its form does."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(self, name, () if value is None else _items(name, value))
        if self.allowed_token_ids is not None:
            allowed = _items("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
        self._check_lengths()
        self._check_types()
        self._check_ranges()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _check_lengths(self) -> None:
        """First, so that a list of a million items costs no more than its length."""
        bounds = {
            "stop": MAX_STOP_STRINGS,
            "stop_token_ids": MAX_STOP_TOKEN_IDS,
            "bad_words": MAX_BAD_WORDS,
            "logit_bias": MAX_LOGIT_BIASES,
        }
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.80}",
                "logit_bias",
            )
        for name, most in bounds.items():
            if (length := len(getattr(self, name))) > most:
                raise InvalidRequestError(
                    f"{name} has {length} entries, at most {most} are allowed", name
                )

    def _check_types(self) -> None:
        def whole(name: str, optional: bool) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequestError(f"{name} must be an integer, got {value!r}", name)

        for name in ("n", "top_k", "min_tokens"):
            whole(name, optional=False)
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            whole(name, optional=True)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequestError(f"{name} must be a number, got {value!r}", name)
            if not abs(value) <= sys.float_info.max:  # NaN neither; 10**400 is no float
                raise InvalidRequestError(f"{name} must be finite, got {value}", name)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} must be True or False, got {getattr(self, name)!r:.80}", name
                )
        held = self.structured_outputs
        if held is not None and not isinstance(held, StructuredOutputsParams):
            raise InvalidRequestError(
                f"structured_outputs must be StructuredOutputsParams, got {held!r:.80}",
                "structured_outputs",
            )
        for name, kind in (("stop", str), ("bad_words", str), ("stop_token_ids", int)):
            for item in getattr(self, name):
                if isinstance(item, bool) or not isinstance(item, kind):
                    raise InvalidRequestError(
                        f"{name} holds {item!r:.80}, not {kind.__name__}", name
                    )

    def _check_ranges(self) -> None:
        def require(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{name} must be {rule}, got {getattr(self, name)}", name)

        require(1 <= self.n <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}")
        require(self.temperature >= 0, "temperature", "0 or more")
        require(self.top_k >= -1, "top_k", "0 or -1 (off) or positive")
        require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        require(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        require(self.repetition_penalty > 0, "repetition_penalty", "above 0")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "1 or more")
        require(self.min_tokens >= 0, "min_tokens", "0 or more")
        if self.max_tokens is not None:
            require(
                self.min_tokens <= self.max_tokens, "min_tokens", f"<= max_tokens {self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(
                value is None or 0 <= value <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}"
            )
        truncate = self.truncate_prompt_tokens
        require(
            truncate is None or truncate == -1 or truncate >= 1,
            "truncate_prompt_tokens",
            "1 or more, or -1",
        )
        require(all(self.stop), "stop", "free of empty strings")
        require(all(self.bad_words), "bad_words", "free of empty strings")
        require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids",
            "None or hold a token id",
        )
        if self.allowed_token_ids is not None and self.structured_outputs is not None:
            raise InvalidRequestError(
                "allowed_token_ids and structured_outputs could leave no token: give one of them",
                "allowed_token_ids",
            )
        if self.seed is not None:
            require(-(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        for token_id, bias in self.logit_bias.items():
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} must be a number, got {bias!r:.80}",
                    "logit_bias",
                )
            if not -100 <= bias <= 100:
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} must be in [-100, 100], got {bias}",
                    "logit_bias",
                )


def _items(name: str, value: object) -> tuple[Any, ...]:
    """A list's items; a text is no list of its letters."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a list, got {value!r:.80}", name)
    return tuple(value)
