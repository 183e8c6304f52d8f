"""How an engine speculates: who proposes drafts, and how many."""

import json
from dataclasses import dataclass, fields
from typing import Literal

from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.model_config import ModelConfig

BuiltInMethod = Literal["ngram", "draft_model", "early_exit", "head"]
BUILT_IN_METHODS: tuple[BuiltInMethod, ...] = ("ngram", "draft_model", "early_exit", "head")
MAX_DRAFTS = 16
"""Beyond these even drafts of which nine in ten are accepted cost more than they bring."""
MAX_SPECULATING_ROWS = 64
"""Requests of a step that are decoded with drafts; where more decode, none has any. A batch of
so many already reads its weights for many tokens, and this bounds the memory of their logits."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding (arXiv 2211.17192), concrete: ``runtime.resolve`` fills in what a user
    leaves out.

    Raises:
        InvalidConfigError: a value out of range.
    """

    method: str
    """``ngram``, ``draft_model``, ``early_exit``, ``head``, or a user's own ``module:Class``."""
    num_speculative_tokens: int = 4
    """Most drafts of a request and step."""
    adaptive: bool = True
    """Lets measured acceptance and batch size choose fewer drafts, or none."""
    model: str | None = None
    """Of ``draft_model`` and ``head``: where their weights are, as ``--model`` says it."""
    model_config: ModelConfig | None = None
    """The draft model's, once resolved."""
    num_layers: int | None = None
    """Of ``early_exit``: how many of the target's layers make the draft."""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    """Of ``ngram``: lengths of the token runs that are looked up, longest first."""
    on_device: bool = False
    """Drafts are made where the model runs, from what a step leaves there; else on the host, from
    tokens that it knows."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise InvalidConfigError(
                f"num_speculative_tokens must be between 1 and {MAX_DRAFTS}, got "
                f"{self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise InvalidConfigError(
                f"prompt_lookup_min must be at least 1 and at most prompt_lookup_max, got "
                f"{self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )
        if self.num_layers is not None and self.num_layers < 1:
            raise InvalidConfigError(f"num_layers must be 1 or more, got {self.num_layers}")

    def __str__(self) -> str:
        """As a user would say it: the JSON of ``--speculative-config``."""
        said = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("model_config", "on_device")  # those are found again
            and getattr(self, item.name) != item.default
        }
        return json.dumps(said)

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Numbers of drafts among which a step chooses, 0 first: each is a CUDA graph."""
        ladder = (0, 1, 2, 3, 4, 6, 8, 12, 16)
        most = self.num_speculative_tokens
        return (*(count for count in ladder if count < most), most)
