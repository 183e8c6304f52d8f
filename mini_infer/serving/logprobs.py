"""Log-probabilities in the three shapes that the API has for them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mini_infer.core.outputs import Logprob
from mini_infer.serving.text_offsets import PromptText

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

    ``text_offset`` is where a token begins in the returned text: in characters, the prompt counts
    if it is echoed, and a special token that the text leaves out has no length. A token that
    begins inside a character has that character's offset. Tokens of a stop string that is cut off
    are counted as if it stood there: a stream tells of them before anybody knows that it goes.
    """

    def __init__(self, prompt: PromptText, echo: bool) -> None:
        self._prompt = prompt
        self._position = prompt.end(echo)

    def echo(self, logprobs: Sequence[Candidates | None], num_top: int) -> dict[str, Any]:
        """The echoed prompt's tokens. Nothing predicts the first one."""
        first, *offsets = self._prompt.offsets
        rest = _entries([item for item in logprobs if item], offsets, num_top)
        return {
            "tokens": [self._prompt.first_token, *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": [first, *rest["text_offset"]],
        }

    def add(self, logprobs: Sequence[Candidates], num_top: int) -> dict[str, Any]:
        """The answer's next tokens."""
        offsets = [
            self._position.advance(self._prompt.shown_bytes(next(iter(candidates))))
            for candidates in logprobs
        ]
        return _entries(logprobs, offsets, num_top)


def _entries(
    logprobs: Sequence[Candidates], offsets: Sequence[int], num_top: int
) -> dict[str, Any]:
    piece = no_logprobs()
    for candidates, offset in zip(logprobs, offsets, strict=True):
        item = _standing(candidates)
        top = {other.decoded_token: other.logprob for other in _likeliest(candidates, num_top)}
        # First and last: of candidates that are spelled alike, its own value counts.
        own = {item.decoded_token: item.logprob}
        piece["tokens"].append(item.decoded_token)
        piece["token_logprobs"].append(item.logprob)
        piece["top_logprobs"].append(own | top | own)
        piece["text_offset"].append(offset)
    return piece


def no_logprobs() -> dict[str, Any]:
    """A piece of a ``CompletionLogprobs`` that holds no token."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two pieces of a ``CompletionLogprobs``, as one."""
    return {name: first[name] + second[name] for name in first}
