"""``text_offset``: where each token begins in the text that a plain completion returns."""

import codecs
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mini_infer.runtime.tokenizer import Tokenizer


class TextPosition:
    """Reads a text's bytes token by token and counts its characters, as the detokenizer does.

    With ``strip_space`` the text loses a leading space, as sentencepiece's dummy prefix asks.
    """

    def __init__(self, num_chars: int, strip_space: bool) -> None:
        self._num_chars = num_chars
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def advance(self, data: bytes) -> int:
        """Reads a token; returns the index of the character that its first byte is a part of."""
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        if not data:
            return self._num_chars
        self._num_chars += len(self._decoder.decode(data[:1]))
        is_incomplete = bool(self._decoder.getstate()[0])
        offset = self._num_chars if is_incomplete else self._num_chars - 1
        self._num_chars += len(self._decoder.decode(data[1:]))
        return offset


class PromptText:
    """A prompt as its answer shows it: its text, and where its tokens begin in that.

    A prompt that came as text is echoed as it came. One that came as token ids is decoded like the
    answer, without special tokens unless these are asked for.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt: str | Sequence[int],
        skip_special_tokens: bool,
        add_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._skip_special_tokens = skip_special_tokens
        self._add_special_tokens = add_special_tokens

    @cached_property
    def token_ids(self) -> Sequence[int]:
        if isinstance(self._prompt, str):
            return self._tokenizer.encode(self._prompt, self._add_special_tokens)
        return self._prompt

    @cached_property
    def text(self) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        return self._tokenizer.decode(self._prompt, self._skip_special_tokens)

    @cached_property
    def offsets(self) -> list[int]:
        """Of each token in ``text``; never beyond its end, where a tokenizer changes texts."""
        position = TextPosition(0, self._tokenizer.strips_leading_space)
        return [min(position.advance(data), len(self.text)) for data in self._shown()]

    @property
    def first_token(self) -> str:
        """The spelling of the token that no log-probabilities come with."""
        return self._tokenizer.token_bytes(self.token_ids[0]).decode(errors="replace")

    def end(self, echo: bool) -> TextPosition:
        """Where the answer begins."""
        strips = self._tokenizer.strips_leading_space and not any(
            map(self.shown_bytes, self.token_ids)
        )
        return TextPosition(len(self.text) if echo else 0, strips)

    def shown_bytes(self, token_id: int) -> bytes:
        """What a token of the answer adds to the text."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _shown(self) -> Iterator[bytes]:
        """What each of the prompt's tokens adds to ``text``.

        In a prompt that came as text special tokens show where the text spells them; others, like
        a first token that the tokenizer adds, do not.
        """
        if not isinstance(self._prompt, str):
            yield from map(self.shown_bytes, self._prompt)
            return
        text = self._prompt.encode()
        num_bytes = 0
        for token_id in self.token_ids:
            data = self._tokenizer.token_bytes(token_id)
            if self._tokenizer.is_special(token_id) and not text.startswith(data, num_bytes):
                data = b""
            yield data
            if num_bytes == 0 and self._tokenizer.strips_leading_space:
                data = data.removeprefix(b" ")
            num_bytes += len(data)
