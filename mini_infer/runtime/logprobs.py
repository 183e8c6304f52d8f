"""Log-probabilities of token ids, made ready to show: with each token's text and bytes."""

import math

from mini_infer.core.outputs import Logprob, TokenLogprobs
from mini_infer.runtime.tokenizer import Tokenizer


class LogprobRenderer:
    """Spells the candidates of a position. Keeps each spelling: at most the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spellings: dict[int, tuple[str, tuple[int, ...]]] = {}

    def render(self, position: TokenLogprobs, num_top: int) -> dict[int, Logprob]:
        """By token id: the token that stands there first, then the ``num_top`` likeliest ones of
        those that a grammar allows there."""
        shown = {
            position.token_id: self._logprob(position.token_id, position.logprob, position.rank)
        }
        for rank, (token_id, logprob) in enumerate(position.top[:num_top], start=1):
            if logprob > -math.inf:
                shown.setdefault(token_id, self._logprob(token_id, logprob, rank))
        return shown

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        spelling = self._spellings.get(token_id)
        if spelling is None:
            data = self._tokenizer.token_bytes(token_id)
            spelling = (data.decode("utf-8", errors="replace"), tuple(data))
            self._spellings[token_id] = spelling
        return Logprob(logprob, rank, *spelling)
