"""Token ids to text while they arrive, in time linear in the number of tokens."""

import codecs
from collections.abc import Sequence

from mini_infer.runtime.tokenizer import Tokenizer


class TokenTexts(dict[int, bytes]):
    """Each token's bytes in a text, b"" of special ones that are skipped; looked up once each.

    Shared by all choices, so that the whole text of one that nobody streamed is a join.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.strips_leading_space = tokenizer.strips_leading_space
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(token_id)
        if data and self._skip_special_tokens and self._tokenizer.is_special(token_id):
            data = b""
        self[token_id] = data
        return data


class IncrementalDetokenizer:
    """Turns one choice's output tokens into text; a character split over tokens waits.

    The usual way (text-generation-inference, vLLM) decodes a window of tokens twice and takes the
    difference, waiting while it ends in U+FFFD: a genuine U+FFFD stalls it, and a long wait costs
    quadratic time. Here each token's bytes go once through an incremental UTF-8 decoder, which
    knows whether a tail is incomplete or invalid.

    The joined pieces are the output's own bytes read as UTF-8: bytes of the prompt never take part.
    They equal ``tokenizer.decode(output ids)``, except that a tokenizer that strips a text's
    leading space does so only where the output is the start of the text, not after a prompt.
    """

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int] = ()) -> None:
        self._bytes_of = texts.__getitem__
        self._unread = b""
        """The beginning of a character whose other bytes are yet to come."""
        self._strip_space = texts.strips_leading_space and not any(
            map(self._bytes_of, prompt_token_ids)
        )

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete."""
        data = b"".join(map(self._bytes_of, token_ids))
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decode(data)

    def flush(self) -> str:
        """What an incomplete last character becomes: U+FFFD, or "" when nothing waits."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._unread + data
        text, num_read = codecs.utf_8_decode(data, "replace", final)
        self._unread = data[num_read:]
        return text
