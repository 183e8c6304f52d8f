"""Splits what a model thought from its answer: ``<think>...</think>``, as Qwen3 writes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_infer.core.structured_outputs import Thoughts
from mini_infer.serving.tool_calls import TagFinder

if TYPE_CHECKING:
    from mini_infer.runtime.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought."""

    text: str


def opens_reasoning(prompt: str) -> bool:
    """Does the prompt end within the model's thoughts?"""
    return prompt.rstrip().endswith(OPEN)


def continues_reasoning(content: str) -> bool:
    """Does a message that is to be continued end within its thoughts?"""
    return content.rfind(OPEN) > content.rfind(CLOSE)


def thoughts_after(prompt: str, opened: bool, continued: bool) -> Thoughts:
    """How a reasoning model's answer to ``prompt`` may begin: after closed thoughts, or as a
    message's end, with none."""
    if opened:
        return "open"
    return "none" if continued or prompt.rstrip().endswith(CLOSE) else "optional"


def num_reasoning_tokens(tokenizer: "Tokenizer", token_ids: Sequence[int]) -> int:
    """Of an answer that begins with thoughts: its tokens up to their end tag's last."""
    tail = b""
    for count, token_id in enumerate(token_ids, start=1):
        tail += tokenizer.token_bytes(token_id)
        if CLOSE.encode() in tail:
            return count
        tail = tail[-len(CLOSE) :]
    return len(token_ids)


class ReasoningParser:
    """Reads one answer's text; any split of it gives the same joined thoughts and the same text.

    The thoughts begin where the prompt ends, or where the answer begins with their tag. White
    space around the tags belongs to neither part. Thoughts without an end are all that there is.
    """

    def __init__(self, opened: bool) -> None:
        self._opened = opened
        self._finder = TagFinder()
        self._read = self._read_start
        self._space = ""
        """White space that belongs to what follows, if anything does."""
        self._begun = False
        """Was a thought told of?"""

    def append(self, text: str) -> list[str | Reasoning]:
        """What ``text`` completes; what could yet be a tag, or space beside one, is held back."""
        return self._read(text)

    def finish(self) -> list[str | Reasoning]:
        """What was held back, once the text is at its end."""
        if self._read == self._read_start and not self._opened:
            return [self._space] if self._space else []
        if self._read in (self._read_start, self._read_thoughts):
            return self._think(self._finder.flush())
        return []

    def _read_start(self, text: str) -> list[str | Reasoning]:
        text, self._space = self._space + text, ""
        start = text.lstrip()
        if start.startswith(OPEN):
            self._read = self._read_thoughts
            return self._read(start.removeprefix(OPEN))
        if OPEN.startswith(start):  # also while there is nothing but space
            self._space = text
            return []
        self._read = self._read_thoughts if self._opened else self._read_answer
        return self._read(text)

    def _read_thoughts(self, text: str) -> list[str | Reasoning]:
        before, rest = self._finder.split(text, CLOSE)
        pieces = self._think(before)
        if rest is None:
            return pieces
        self._read = self._read_space
        return pieces + self._read(rest)

    def _read_space(self, text: str) -> list[str | Reasoning]:
        text = text.lstrip()
        if text:
            self._read = self._read_answer
        return [text] if text else []

    def _read_answer(self, text: str) -> list[str | Reasoning]:
        return [text] if text else []

    def _think(self, text: str) -> list[str | Reasoning]:
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return [Reasoning(shown)] if shown else []
