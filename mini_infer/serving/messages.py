"""A choice's text as the parts of an assistant's message: thoughts, content, tool calls."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.serving.reasoning import Reasoning, ReasoningParser
from mini_infer.serving.tool_calls import ArgumentsPiece, TextOrCall, ToolCall, ToolParser

if TYPE_CHECKING:
    from mini_infer.runtime.tokenizer import Tokenizer

Part = str | Reasoning | ToolCall | ArgumentsPiece
"""A piece of content or of the thoughts, a call, or a piece of the last call's arguments."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How the texts of one request's choices are read."""

    opens_reasoning: bool = False
    """Does the prompt end within the model's thoughts?"""
    tool_parser: Callable[[], ToolParser] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    is_named: bool = False
    """Must the answer call one function that the caller named? OpenAI's then ends with "stop"."""
    needs_special_tokens: bool = False
    """Are tags that it looks for special tokens, which a text leaves out by default?"""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a conversation, how its answers are read, and the form they are held to."""

    prompt: str
    tokenizer: "Tokenizer"
    form: MessageForm
    held: StructuredOutputsParams | None = None
    add_special_tokens: bool = False

    def token_ids(self, num_kept: int) -> list[int]:
        """The last ``num_kept`` of the prompt's tokens."""
        return self.tokenizer.encode(self.prompt, self.add_special_tokens)[-num_kept:]


class MessageParser:
    """Reads one choice's text as it comes: any split of it gives the same message."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._reasoning = ReasoningParser(form.opens_reasoning)
        self._tools = None if form.tool_parser is None else form.tool_parser()
        self.num_calls = 0
        self._skips = False
        """Does the last call not count?"""

    def append(self, text: str) -> list[Part]:
        """The parts that ``text`` completes."""
        return self._select(self._reasoning.append(text)) if text else []

    def finish(self) -> list[Part]:
        """The parts that were held back, once the text is at its end."""
        parts = self._select(self._reasoning.finish())
        if self._tools is not None:
            parts += self._count(self._tools.finish())
        return parts

    def _select(self, parts: list[str | Reasoning]) -> list[Part]:
        selected: list[Part] = []
        for part in parts:
            if isinstance(part, Reasoning):
                if self._form.include_reasoning:
                    selected.append(part)
            elif self._tools is None:
                selected.append(part)
            else:
                selected += self._count(self._tools.append(part))
        return selected

    def _count(self, parts: list[TextOrCall]) -> list[Part]:
        counted: list[Part] = []
        for part in parts:
            if isinstance(part, ToolCall):
                self._skips = self.num_calls > 0 and not self._form.parallel_tool_calls
                self.num_calls += not self._skips
            if isinstance(part, str) or not self._skips:
                counted.append(part)
        return counted


@dataclass(frozen=True, slots=True)
class Message:
    """A whole answer's parts."""

    content: str
    reasoning: str
    calls: list[ToolCall]


def read_message(form: MessageForm, text: str) -> Message:
    """The message that a whole text is."""
    parser = MessageParser(form)
    parts = parser.append(text) + parser.finish()
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append(part)
        elif isinstance(part, ArgumentsPiece):
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + part.text)
    return Message(
        "".join(part for part in parts if isinstance(part, str)),
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        calls,
    )


def call_id() -> str:
    """A new name for a call, for its result to refer to."""
    return f"call_{uuid.uuid4().hex[:24]}"


def call_object(call: ToolCall) -> dict[str, Any]:
    """A call as OpenAI's chat answers have it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}


def call_deltas(index: int, call: ToolCall) -> list[dict[str, Any]]:
    """A call as OpenAI's chat chunks have it: who is called, then the arguments that are there."""
    start = {"tool_calls": [{"index": index, **call_object(ToolCall(call.name, ""))}]}
    return [start, *arguments_deltas(index, call.arguments)]


def arguments_deltas(index: int, text: str) -> list[dict[str, Any]]:
    """A piece of a call's arguments as OpenAI's chat chunks have it."""
    return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}] if text else []
