"""What the API accepts, with OpenAI's names, and vLLM's for what OpenAI lacks.

A field that is accepted is honoured. One that OpenAI or vLLM has and that can't be honoured is
refused, unless it holds a value that asks for nothing. What changes no answer is accepted without
effect: labels for the caller's own books (``user``, ``safety_identifier``, ``metadata``), a hint
for routing (``prompt_cache_key``), ``parallel_tool_calls`` where no tool is given, and
``spaces_between_special_tokens``, as decoding never adds any. Names that neither API has are
ignored, as vLLM does, and logged once (``other_fields.py``). ``docs/api.md`` has the table.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.sampling_params import MAX_LOGPROBS, SamplingParams
from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.serving.messages import RenderedChat
from mini_infer.serving.other_fields import refuse_fields, tell_unknown
from mini_infer.serving.output_form import output_form
from mini_infer.serving.tool_calls import ToolChoice, check_tools, read_tool_choice

DEFAULT_COMPLETION_TOKENS = 16
MAX_BATCH_CHOICES = 4096
"""Most prompts times ``n`` of one request: a larger batch would keep all others waiting."""

SERVICE_TIERS = ("auto", "default")

SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "truncate_prompt_tokens",
)
"""Fields that go to ``SamplingParams`` as they are; null means its default."""


CHAT_ONLY = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
)
COMPLETIONS_ONLY = ("prompt", "echo", "best_of")


class StreamOptions(BaseModel):
    """How a stream reports its usage."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    """A last chunk without choices that holds the usage."""
    continuous_usage_stats: bool = False
    """With it each chunk holds its choice's usage so far."""


class RequestBody(BaseModel):
    """The fields that chat and plain completions share."""

    model_config = ConfigDict(strict=True, extra="allow")

    OTHER_FIELDS: ClassVar[frozenset[str]] = frozenset()
    """Those of other endpoints, which ``check`` knows."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    """vLLM's: does the tokenizer add its own, such as the first of a text? By default to a plain
    prompt; a chat template writes them itself."""
    return_token_ids: bool | None = None
    """vLLM's: the prompt's token ids, and each choice's."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: ``json``, ``regex``, ``choice``, ``grammar`` or ``json_object``."""
    service_tier: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def answer_fields(self) -> dict[str, Any]:
        """What the answer and each of its chunks repeat of the request: there is one tier here."""
        return {} if self.service_tier is None else {"service_tier": "default"}

    def check(self) -> None:
        """Raises InvalidRequestError for a field, or a combination, that can't be honoured."""
        options = self.stream_options or StreamOptions()
        extra = self.model_extra or {}
        refuse_fields({**extra, **(options.model_extra or {})})
        tell_unknown(name for name in extra if name not in self.OTHER_FIELDS)
        if self.service_tier is not None and self.service_tier not in SERVICE_TIERS:
            raise InvalidRequestError(
                f"service_tier {self.service_tier!r:.40} is not supported: there is only 'default'",
                "service_tier",
            )
        if options.continuous_usage_stats and not options.include_usage:
            raise InvalidRequestError(
                "continuous_usage_stats needs include_usage: true", "continuous_usage_stats"
            )
        if self.stream_options and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed together with stream: true", "stream_options"
            )

    def _refuse_fields_of(self, path: str, names: Iterable[str]) -> None:
        for name in names:
            value = (self.model_extra or {}).get(name)
            if value is not None and value is not False and value != []:
                raise InvalidRequestError(f"{name} is only supported by {path}", name)

    def output_form(self) -> StructuredOutputsParams | None:
        """The form that answers are held to."""
        return output_form(self.structured_outputs, self.response_format)

    def _sampling_params(self, **fields: Any) -> SamplingParams:
        for name in SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        return SamplingParams(logit_bias=_logit_bias(self.logit_bias or {}), **fields)


class ChatCompletionRequest(RequestBody):
    """Body of POST /v1/chat/completions."""

    OTHER_FIELDS = frozenset(COMPLETIONS_ONLY)

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """OpenAI's newer name of ``max_tokens``; wins over it. Neither: the rest of the context."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    """Default: true, unless the final message is continued."""
    continue_final_message: bool = False
    """The answer goes on where the last message ends, instead of starting a new turn."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """False: only the first call of an answer counts."""
    include_reasoning: bool = True
    """False leaves out what the model thought before its answer."""

    _rendered: RenderedChat | None = PrivateAttr(None)
    _form: StructuredOutputsParams | None = PrivateAttr(None)

    @property
    def rendered(self) -> RenderedChat:
        """What ``chat_prompt`` made of the messages."""
        assert self._rendered is not None, "chat_prompt comes first"
        return self._rendered

    def set_rendered(self, rendered: RenderedChat) -> None:
        self._rendered = rendered

    def hold_to(self, form: StructuredOutputsParams) -> None:
        """Holds answers to a form that came in a field of another API."""
        self._form = form

    def output_form(self) -> StructuredOutputsParams | None:
        return self._form or super().output_form()

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of: with ``tool_choice`` "none" it knows of none."""
        return [] if self.tool_choice == "none" else self.tools or []

    def read_tool_choice(self) -> ToolChoice:
        """What ``tool_choice`` asks for."""
        return read_tool_choice(self.tools, self.tool_choice)

    def check(self) -> None:
        super().check()
        self._refuse_fields_of("/v1/completions", COMPLETIONS_ONLY)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt can't both be true",
                "continue_final_message",
            )
        self.check_tools()
        if self.top_logprobs:  # 0 asks for none
            if not self.logprobs:
                raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise InvalidRequestError(
                    f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {self.top_logprobs}",
                    "top_logprobs",
                )

    def check_tools(self) -> None:
        """Raises InvalidRequestError for tools, a choice or a form of answers that can't be."""
        check_tools(self.tools)
        choice = self.read_tool_choice()
        form = self.output_form()
        if form is not None and self.usable_tools and (choice.required or form.json is None):
            raise InvalidRequestError(
                "tools go together with a JSON schema for answers without a call, where "
                "tool_choice is 'auto'; not with another form",
                "tools"
                if self._form
                else "structured_outputs"
                if self.structured_outputs
                else "response_format",
            )

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range."""
        name, max_tokens = "max_tokens", self.max_tokens
        if self.max_completion_tokens is not None:
            name, max_tokens = "max_completion_tokens", self.max_completion_tokens
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequestError(f"{name} must be 1 or more, got {max_tokens}", name)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        needs_special = self._rendered is not None and self._rendered.form.needs_special_tokens
        return self._sampling_params(
            max_tokens=max_tokens,
            logprobs=logprobs,
            skip_special_tokens=not needs_special,
            structured_outputs=self.output_form() if self._rendered is None else self.rendered.held,
        )


class CompletionRequest(RequestBody):
    """Body of POST /v1/completions."""

    OTHER_FIELDS = frozenset(CHAT_ONLY)

    prompt: str | list[Any] = Field(
        description="A string, a list of strings, a list of token ids, or a list of such lists."
    )
    echo: bool = False
    """Put the prompt before each choice's text."""
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def only_echoes(self) -> bool:
        """Is nothing asked for but the prompt, to score it?"""
        return self.echo and self.max_tokens == 0

    def check(self) -> None:
        super().check()
        self._refuse_fields_of("/v1/chat/completions", CHAT_ONLY)
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                "echo can't show a prompt that truncate_prompt_tokens cuts; leave out one",
                "truncate_prompt_tokens",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                "best_of is only supported where it equals n; leave it out", "best_of"
            )

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.only_echoes:
            max_tokens = 1  # which ``without_output`` leaves out
        params = self._sampling_params(
            max_tokens=max_tokens, logprobs=self.logprobs, structured_outputs=self.output_form()
        )
        if self.echo and params.logprobs is not None:
            # The prompt's log-probabilities are part of the echo.
            count = max(params.logprobs, params.prompt_logprobs or 0)
            return dataclasses.replace(params, prompt_logprobs=count)
        return params

    def prompts(self) -> list[str | list[int]]:
        """The prompts of the batch.

        Raises:
            InvalidRequestError: ``prompt`` is empty, too large a batch, or has none of the four
                shapes.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("prompt is an empty list; give at least one", "prompt")
        if all(_is_token_id(item) for item in self.prompt):
            return [self.prompt]
        if all(isinstance(item, str) for item in self.prompt) or all(
            isinstance(item, list) and all(_is_token_id(token_id) for token_id in item)
            for item in self.prompt
        ):
            if len(self.prompt) * (self.n or 1) > MAX_BATCH_CHOICES:
                raise InvalidRequestError(
                    f"{len(self.prompt)} prompts with n = {self.n or 1} are more than "
                    f"{MAX_BATCH_CHOICES} choices: send several requests",
                    "prompt",
                )
            return self.prompt
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids, "
            "or a list of lists of token ids",
            "prompt",
        )


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """Only ``str(id)`` is a key: ``int`` would also read "1_0" or " 1 ", and two such keys could
    be one id."""
    for key in biases:
        if not (key.isascii() and key.isdigit() and (key == "0" or key[0] != "0")):
            raise InvalidRequestError(
                f'logit_bias maps token ids to numbers, like {{"50256": -100}}; got {key!r:.40}',
                "logit_bias",
            )
    try:
        return {int(key): bias for key, bias in biases.items()}
    except ValueError:  # Python reads no number of thousands of digits
        raise InvalidRequestError(
            "logit_bias has a key that is longer than any token id", "logit_bias"
        ) from None
