"""Log-probabilities in the three shapes that the API has for them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mini_infer.core.outputs import Logprob

Candidates = Mapping[int, Logprob]
"""The candidates at one position by token id: first the one that stands there, then the likeliest.
"""


def _standing(candidates: Candidates) -> Logprob:
    return next(iter(candidates.values()))


def _likeliest(candidates: Candidates, count: int) -> list[Logprob]:
    return sorted(candidates.values(), key=lambda item: -item.logprob)[:count]


def chat_logprobs(logprobs: Sequence[Candidates], num_top: int) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""

    def entry(item: Logprob) -> dict[str, Any]:
        return {"token": item.decoded_token, "logprob": item.logprob, "bytes": list(item.bytes)}

    return {
        "content": [
            entry(_standing(candidates))
            | {"top_logprobs": [entry(item) for item in _likeliest(candidates, num_top)]}
            for candidates in logprobs
        ],
        "refusal": None,
    }


def prompt_logprobs(
    positions: Iterable[Candidates | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: by token id; null for the first token, which nothing predicts."""
    if positions is None:
        return None
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": item.logprob,
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for token_id, item in candidates.items()
        }
        for candidates in positions
    ]


class CompletionLogprobs:
    """``logprobs`` of one choice of a plain completion, in pieces as the tokens come.

    ``text_offset`` is where a token's text begins in the choice's text, which counts the prompt if
    it is echoed. It is counted in characters that the tokens' bytes begin, because a token may
    hold a part of a character only.
    """

    def __init__(self) -> None:
        self._num_chars = 0

    def echo(
        self, text: str, logprobs: Sequence[Candidates | None], num_top: int
    ) -> dict[str, Any]:
        """The echoed prompt's tokens; those that follow are counted from its end.

        Nothing predicts the first token, so its text is what the others leave of the prompt.
        """
        rest = self.add([candidates for candidates in logprobs if candidates], num_top)
        shift = max(0, len(text) - self._num_chars)
        self._num_chars = len(text)
        return {
            "tokens": [text[:shift], *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": [0, *(offset + shift for offset in rest["text_offset"])],
        }

    def add(self, logprobs: Sequence[Candidates], num_top: int) -> dict[str, Any]:
        """The next tokens."""
        piece = no_logprobs()
        for candidates in logprobs:
            item = _standing(candidates)
            top = {other.decoded_token: other.logprob for other in _likeliest(candidates, num_top)}
            continues = bool(item.bytes) and _continues(item.bytes[0])
            piece["tokens"].append(item.decoded_token)
            piece["token_logprobs"].append(item.logprob)
            # First and last: of candidates that are spelled alike, its own value counts.
            own = {item.decoded_token: item.logprob}
            piece["top_logprobs"].append(own | top | own)
            piece["text_offset"].append(max(0, self._num_chars - continues))
            self._num_chars += sum(not _continues(byte) for byte in item.bytes)
        return piece


def no_logprobs() -> dict[str, Any]:
    """A piece of a ``CompletionLogprobs`` that holds no token."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _continues(byte: int) -> bool:
    """Is it a UTF-8 byte inside a character?"""
    return byte & 0xC0 == 0x80


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two pieces of a ``CompletionLogprobs``, as one."""
    return {name: first[name] + second[name] for name in first}
