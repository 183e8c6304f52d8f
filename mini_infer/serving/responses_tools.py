"""Tools in /v1/responses: OpenAI's flat form of them, of calls and of their results."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer.core.errors import InvalidRequestError

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as chat completions have them.

    Raises:
        InvalidRequestError: one is no function.
    """
    converted = []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise InvalidRequestError(
                f"tools[{index}].type must be 'function': tools of other types are not supported",
                "tools",
            )
        function = {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}
        converted.append({"type": "function", "function": function})
    return converted


def chat_tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """``tool_choice`` as chat completions have it."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise InvalidRequestError(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'name': ...}",
            "tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def shown_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools as the answer repeats them."""
    return [
        {"type": "function", **{name: tool.get(name) for name in FUNCTION_FIELDS}}
        for tool in tools or ()
    ]


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    """An output item of a call."""
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def read_call(place: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """A ``function_call`` item of the input, as one of a message's ``tool_calls``."""
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise InvalidRequestError(f"{place}.{name} must be a string", "input")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def read_result(place: str, item: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A ``function_call_output`` item of the input, as a message."""
    if not isinstance(item.get("call_id"), str):
        raise InvalidRequestError(f"{place}.call_id must be a string", "input")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}
