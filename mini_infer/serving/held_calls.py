"""Calls that a grammar holds to their form (``tool_grammar.py``): they are told while they come.

Of any other call nobody knows whether its JSON will be whole, and broken JSON stays text. Of these
it is known, so that the name goes out when it is there, and the arguments in pieces.
"""

import json
import re

from mini_infer.serving.tool_calls import (
    CLOSE,
    OPEN,
    ArgumentsPiece,
    HermesToolParser,
    TagFinder,
    TextOrCall,
    ToolCall,
)

HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
END = "}\n" + CLOSE
"""No JSON text holds it: a string's line feed is written as an escape."""


class HeldHermesToolParser(HermesToolParser):
    """Reads calls of exactly the form that the grammar has."""

    def __init__(self) -> None:
        super().__init__()
        self._arguments: TagFinder | None = None
        """Looks for the end of the arguments that the text is in."""
        self._told: list[str] = []
        """The pieces of these arguments."""

    def append(self, text: str) -> list[TextOrCall]:
        pieces: list[TextOrCall] = []
        rest: str | None = text
        while rest is not None:
            if self._arguments is not None:
                before, rest = self._arguments.split(rest, END)
                ends = rest is not None
                self._told.append(before)
                if before or ends:
                    pieces.append(ArgumentsPiece(before, ends))
                if ends:
                    self._arguments = None
            elif self._call is None:
                before, rest = self._finder.split(rest, OPEN)
                pieces += self._say(before)
                if rest is not None:
                    self._call = []
            else:
                self._call.append(rest)
                head = "".join(self._call)
                match = HEAD.match(head)
                rest = None
                if match is not None:
                    pieces.append(ToolCall(json.loads(match[1]), ""))
                    self._call, self._arguments, self._told = None, TagFinder(), []
                    self._space, self._after_call = "", True
                    rest = head[match.end() :]
        return pieces

    def finish(self) -> list[TextOrCall]:
        if self._arguments is None:
            return super().finish()
        held = self._arguments.flush()
        try:
            json.loads("".join(self._told))
        except ValueError:
            return [ArgumentsPiece(held, False)] if held else []
        return [ArgumentsPiece("", True)]  # what is held is the beginning of the end
