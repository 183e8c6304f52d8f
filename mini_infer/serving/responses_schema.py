"""What POST /v1/responses accepts: OpenAI's newer form of a chat request, for text."""

from collections.abc import Mapping
from typing import Any

from mini_infer.core.errors import InvalidRequestError
from mini_infer.runtime.unicode_text import utf8_bytes
from mini_infer.serving.output_form import read_format
from mini_infer.serving.responses_tools import (
    chat_tool_choice,
    chat_tools,
    read_call,
    read_result,
)
from mini_infer.serving.schema import ChatCompletionRequest, RequestBody

RESPONSES_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "include": ([],),
    "max_tool_calls": (),
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that can't be honoured here, each with the values (besides null) that ask for nothing."""
STATEFUL = ("previous_response_id", "conversation", "store", "background")
"""They need answers that are kept."""
OTHER_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Of chat completions, and what they are called here."""
CHAT_FIELDS = (
    "n",
    "prompt_logprobs",
    "logprobs",
    "return_token_ids",
    "add_generation_prompt",
    "continue_final_message",
)
"""Of chat completions, without a place in these answers."""
MAX_METADATA = 16
ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class ResponsesRequest(RequestBody):
    """Body of POST /v1/responses. The sampling fields of chat completions are accepted too."""

    OTHER_FIELDS = frozenset((*RESPONSES_REFUSED, *OTHER_NAMES, *CHAT_FIELDS))

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = None
    """None: the rest of the context."""
    metadata: dict[str, str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """False: only the first call of an answer counts."""

    def check(self) -> None:
        extra = self.model_extra or {}
        if extra.get("store"):
            raise _needs_memory("store")
        for name, harmless in RESPONSES_REFUSED.items():
            value = extra.get(name)
            if value is None or value in harmless:
                continue
            if name in STATEFUL:
                raise _needs_memory(name)
            raise InvalidRequestError(f"{name} is not supported by /v1/responses here", name)
        super().check()
        for name, other in OTHER_NAMES.items():
            if _given(self, name):
                raise InvalidRequestError(f"{name} is called {other} in /v1/responses", name)
        for name in CHAT_FIELDS:
            if _given(self, name) and (name != "n" or self.n != 1):
                raise InvalidRequestError(f"{name} is only supported by /v1/chat/completions", name)
        if self.include_usage:
            raise InvalidRequestError(
                "include_usage is for chat completions: here the last event has the usage",
                "stream_options",
            )
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidRequestError(
                f"max_output_tokens must be 1 or more, got {self.max_output_tokens}",
                "max_output_tokens",
            )
        _check_metadata(self.metadata or {})
        text = {name: item for name, item in (self.text or {}).items() if name != "format"}
        _check_plain("text", text, {"verbosity": ("medium",)})
        _check_plain("reasoning", self.reasoning, {"effort": ("none",)})

    def chat_request(self) -> ChatCompletionRequest:
        """The same request to chat completions.

        Raises:
            InvalidRequestError: an item of ``input`` that is no message of text and no call, or
                malformed tools or ``text.format``.
        """
        shared = {name: getattr(self, name) for name in RequestBody.model_fields}
        chat = ChatCompletionRequest(
            **shared,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=chat_tools(self.tools or ()),
            tool_choice=chat_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
        )
        text_format = (self.text or {}).get("format")
        if text_format is not None and not isinstance(text_format, Mapping):
            raise InvalidRequestError("text.format must be an object with a type", "text")
        if (form := read_format(text_format, "text.format")) is not None:
            chat.hold_to(form)
        chat.check_tools()
        return chat

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidRequestError("input is an empty list; give at least one message", "input")
        thoughts: list[str] = []
        for index, item in enumerate(self.input):
            if item.get("type") == "reasoning":
                thoughts.append(
                    _text(f"input[{index}].content", item.get("content") or [], REASONING)
                )
                continue
            kind, place = item.get("type"), f"input[{index}]"
            if kind == "function_call":
                call = read_call(place, item)
                if thoughts or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                message = messages[-1]
                message["tool_calls"] = [*message.get("tool_calls", ()), call]
            elif kind == "function_call_output":
                text = _text(f"{place}.output", item.get("output"), TEXT_PARTS)
                message = read_result(place, item, text)
                messages.append(message)
            else:
                message = _message(place, item)
                messages.append(message)
            if thoughts and message["role"] == "assistant":
                message["reasoning_content"] = "".join(thoughts)
            thoughts = []
        return messages


REASONING = ("reasoning_text",)


def _message(place: str, item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        raise InvalidRequestError(
            f"{place} is of type {item['type']!r:.40}: only messages, reasoning, function calls "
            "and their outputs are supported",
            "input",
        )
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{place}.role must be one of {', '.join(ROLES)}, got {role!r:.80}", "input"
        )
    return {"role": role, "content": _text(f"{place}.content", item.get("content"), TEXT_PARTS)}


def _text(place: str, content: Any, types: tuple[str, ...]) -> str:
    """Parts stand on lines of their own, as in chat messages."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{place} must be a string or a list of parts", "input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        key = "refusal" if kind == "refusal" else "text"
        if kind not in types or not isinstance(part.get(key), str):
            raise InvalidRequestError(
                f"{place} has a part of type {kind!r:.40}: only text is supported, as "
                f"{{'type': '{types[0]}', 'text': ...}}",
                "input",
            )
        texts.append(part[key])
    return "\n".join(texts)


def _given(body: RequestBody, name: str) -> bool:
    value = getattr(body, name, None)
    return value is not None and value is not False


def _needs_memory(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} is not supported: this server keeps no answers; send the whole conversation as "
        "input, with store: false",
        name,
    )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """The answer repeats it, so it must be text that can be sent, and not without bounds."""
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata has {len(metadata)} entries, at most {MAX_METADATA} are allowed", "metadata"
        )
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise InvalidRequestError(
                f"metadata: a key has at most 64 characters and a value 512, got {key!r:.64} with "
                f"{len(value)}",
                "metadata",
            )
        utf8_bytes(key + value, "metadata", "metadata")


def _check_plain(
    name: str, value: Mapping[str, Any] | None, harmless: Mapping[str, tuple[Any, ...]]
) -> None:
    for key, item in (value or {}).items():
        if item is not None and item not in harmless.get(key, ()):
            raise InvalidRequestError(f"{name}.{key} = {item!r:.80} is not supported", name)
