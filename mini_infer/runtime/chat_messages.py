"""Chat messages as a template expects them: plain text contents, parsed tool arguments."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer.core.errors import InvalidRequestError


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checks messages in OpenAI's form and returns copies that any chat template can render.

    A content given as a list of ``{"type": "text", "text": ...}`` parts becomes one string, its
    parts on lines of their own as in vLLM; an absent content becomes "". Tool-call arguments, which
    OpenAI sends as JSON text, become objects, because templates serialise them themselves.

    Raises:
        InvalidRequestError: no message, a message without role, or a part that is not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list of {'role', 'content'}", "messages")
    if not messages:
        raise InvalidRequestError("messages is empty: send at least one message", "messages")
    return [_normalise(message, index) for index, message in enumerate(messages)]


CONTINUATION_TAG = "<|continued from here|> "
"""Marks the end of a final message that is to be continued. Its space tells whether the template
trims contents."""


def tag_final_message(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose last one ends with ``CONTINUATION_TAG``, for ``cut_at_tag`` to find.

    The idea is that of transformers' ``continue_final_message``.

    Raises:
        InvalidRequestError: malformed messages.
    """
    *earlier, last = normalise_messages(messages)
    if last.get("tool_calls"):
        raise InvalidRequestError(
            "continue_final_message: a final message with tool_calls can't be continued",
            "continue_final_message",
        )
    return [*earlier, {**last, "content": last["content"] + CONTINUATION_TAG}]


def cut_at_tag(prompt: str) -> str:
    """A rendered prompt up to where its final message's content ends.

    Raises:
        InvalidRequestError: the template left that content out, or changed it.
    """
    text, found, rest = prompt.rpartition(CONTINUATION_TAG.strip())
    if not found:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not show the final message's "
            "content, so that it can't be continued",
            "continue_final_message",
        )
    return text if rest.startswith(" ") else text.rstrip()


def _normalise(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"messages[{index}] must be an object with a 'role' string", "messages"
        )
    result = dict(message)
    result["content"] = _text(message.get("content"), index)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise InvalidRequestError(f"messages[{index}].tool_calls must be a list", "messages")
        result["tool_calls"] = [_tool_call(call, index) for call in calls]
    return result


TEXT_PARTS = ("text", "refusal")
"""Types of parts, each with its text under the same name; a refusal is what an assistant said."""


def _text(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"messages[{index}].content must be a string or a list of text parts", "messages"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get(kind), str):
            raise InvalidRequestError(
                f"messages[{index}].content has a part of type {kind!r:.80}: only "
                "{'type': 'text', 'text': ...} is supported",
                "messages",
            )
        texts.append(part[kind])
    return "\n".join(texts)


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"messages[{index}].tool_calls must hold objects with a 'function'", "messages"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages[{index}].tool_calls: arguments are not JSON: {error}", "messages"
            ) from None
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"messages[{index}].tool_calls: a function's name must be a string", "messages"
        )
    return {**call, "function": {**function, "arguments": arguments}}
