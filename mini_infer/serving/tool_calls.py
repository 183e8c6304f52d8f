"""Tools: what a request may say of them, and the calls in a model's text while it comes.

A model is told of tools by its chat template, which also teaches it how to write a call. Two forms
are read: Hermes' (Qwen2.5, Qwen3), ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
anywhere in the text, and Llama 3's, where the whole text is one or more objects of ``name`` and
``parameters``. A call is told of once its JSON is complete, because broken JSON stays text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from mini_infer.core.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_DEPTH = 100
"""Of a schema, in levels of JSON: neither templates nor grammars can take a thousand."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
LLAMA_HINT = '{"name": function name, "parameters":'
"""How the templates of Llama 3.1 and later describe a call to the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in an answer; ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


CALL_START = re.compile(r'\{\s*"(?:name|type|parameters|arguments)"')
CALL_START_PART = re.compile(r'\{\s*(?:"[a-z]{0,10})?')
"""What ``CALL_START`` may yet match."""


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A piece of the last call's arguments, where that was told of without them."""

    text: str
    last: bool


TextOrCall = str | ToolCall | ArgumentsPiece


class ToolParser(Protocol):
    """Reads one answer's text. Any split of it gives the same calls and the same joined text."""

    def append(self, text: str) -> list[TextOrCall]:
        """What ``text`` completes; what could yet be a part of a call is held back."""

    def finish(self) -> list[TextOrCall]:
        """What was held back, once the text is at its end."""


def tool_parser_for(template: str) -> Callable[[], ToolParser] | None:
    """The parser for what a chat template teaches the model; None for a form that none reads."""
    if OPEN in template and "<function=" not in template:  # Qwen3-Coder's calls are XML
        return HermesToolParser
    if PYTHON_TAG in template or LLAMA_HINT in template:
        return LlamaToolParser
    return None


class TagFinder:
    """Finds a tag in text that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""
        """The end of the text so far, where it may be the beginning of the tag."""

    def split(self, text: str, tag: str) -> tuple[str, str | None]:
        """The text before the tag, and after it: None while the tag is not there."""
        before, found, rest = (self._held + text).partition(tag)
        self._held = ""
        if found:
            return before, rest
        for length in range(min(len(tag) - 1, len(before)), 0, -1):
            if before.endswith(tag[:length]):
                self._held = before[-length:]
                return before[:-length], None
        return before, None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class HermesToolParser:
    """Calls between tags. White space beside a call is no content."""

    def __init__(self) -> None:
        self._finder = TagFinder()
        self._call: list[str] | None = None
        """The pieces of the call that the text is in; None outside of calls."""
        self._space = ""
        """White space that is content only if text follows it."""
        self._after_call = False
        """Was a call the last that was told?"""

    def append(self, text: str) -> list[TextOrCall]:
        pieces: list[TextOrCall] = []
        rest: str | None = text
        while rest is not None:
            if self._call is None:
                before, rest = self._finder.split(rest, OPEN)
                pieces += self._say(before)
                if rest is not None:
                    self._call = []
            else:
                before, rest = self._finder.split(rest, CLOSE)
                self._call.append(before)
                if rest is not None:
                    pieces += self._end_call(CLOSE)
        return pieces

    def finish(self) -> list[TextOrCall]:
        """A last call may lack its end tag: that is where some models stop."""
        held = self._finder.flush()
        pieces: list[TextOrCall] = []
        if self._call is None:
            pieces += self._say(held)
        else:
            self._call.append(held)
            pieces += self._end_call("")
        if self._space:
            pieces.append(self._space)
        return pieces

    def _say(self, text: str) -> Iterator[str]:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            yield shown

    def _end_call(self, end: str) -> Iterator[TextOrCall]:
        text = "".join(self._call or ())
        self._call = None
        call = _read_call(text)
        if call is None:
            yield from self._say(OPEN + text + end)
        else:
            self._space = ""
            self._after_call = True
            yield call


class LlamaToolParser:
    """A text that begins like a call is held back to its end: all of it is calls, or none."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_text = False
        self._is_object = False

    def append(self, text: str) -> list[TextOrCall]:
        if self._is_text:
            return [text] if text else []
        self._held.append(text)
        if self._is_object:
            return []
        start = "".join(self._held).lstrip()
        tagged = start.startswith(PYTHON_TAG)
        self._is_object = tagged or CALL_START.match(start) is not None
        may_become = PYTHON_TAG.startswith(start) or CALL_START_PART.fullmatch(start)
        self._is_text = not self._is_object and not may_become
        return self._flush() if self._is_text else []

    def finish(self) -> list[TextOrCall]:
        calls = _read_objects("".join(self._held)) if self._is_object else None
        return [*calls] if calls else self._flush()

    def _flush(self) -> list[TextOrCall]:
        text = "".join(self._held)
        self._held = []
        return [text] if text else []


TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": LlamaToolParser,
}
"""By vLLM's names."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)
BETWEEN_OBJECTS = re.compile(r"[\s;]*")


def _read_call(text: str) -> ToolCall | None:
    try:
        return _to_call(DECODER.decode(text))
    except (ValueError, RecursionError):
        return None


def _read_objects(text: str) -> list[ToolCall] | None:
    """The calls of a text that holds nothing else."""
    text = text.strip().removeprefix(PYTHON_TAG).strip()
    calls, position = [], 0
    try:
        while position < len(text):
            value, end = DECODER.raw_decode(text, position)
            call = _to_call(value)
            if call is None:
                return None
            calls.append(call)
            separator = BETWEEN_OBJECTS.match(text, end)
            position = end if separator is None else separator.end()
    except (ValueError, RecursionError):
        return None
    return calls


def _to_call(value: Any) -> ToolCall | None:
    """Raises ValueError or RecursionError where the arguments can't be written as JSON."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON
        arguments = DECODER.decode(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    name.encode()  # half a surrogate pair raises
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(arguments, allow_nan=False)
    return ToolCall(name, text)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What ``tool_choice`` asks for."""

    required: bool = False
    name: str | None = None
    """The function to call, where one is named."""


def read_tool_choice(tools: Sequence[Mapping[str, Any]] | None, value: Any) -> ToolChoice:
    """Raises InvalidRequestError for what is no choice, and for one without the tools for it."""
    if value in (None, "none", "auto"):
        return ToolChoice()
    name = None
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
    if value != "required" and not isinstance(name, str):
        raise InvalidRequestError(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': "
            f"{{'name': ...}}}}, got {value!r:.80}",
            "tool_choice",
        )
    known = [tool["function"]["name"] for tool in tools or ()]
    if not known:
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools", "tools")
    if name is not None and name not in known:
        raise InvalidRequestError(
            f"tool_choice names {name!r:.80}, which is none of the tools", "tool_choice"
        )
    return ToolChoice(True, name)


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises InvalidRequestError for malformed tools."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", "tools"
        )
    for index, tool in enumerate(tools or ()):
        _check_tool(index, tool)


def _check_tool(index: int, tool: Mapping[str, Any]) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"tools[{index}] must be {{'type': 'function', 'function': {{...}}}}: tools of other "
            "types are not supported",
            "tools",
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"tools[{index}].function.name must be a string", "tools")
    for key, kind, shown in (("description", str, "a string"), ("parameters", Mapping, "a schema")):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise InvalidRequestError(f"tools[{index}].function.{key} must be {shown}", "tools")
    if _is_deeper(function.get("parameters"), MAX_DEPTH):
        raise InvalidRequestError(
            f"tools[{index}].function.parameters has more than {MAX_DEPTH} levels", "tools"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"tools[{index}].function.strict must be a boolean", "tools")


def _is_deeper(value: object, depth: int) -> bool:
    """Has JSON more than ``depth`` levels? Without a call per level, of which there may be too
    many."""
    level: list[object] = [value]
    for _ in range(depth + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return bool(level)
