"""What a draft head learns from. Imports no torch: texts are made where there is none."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Text(NamedTuple):
    """Token ids of which those from ``num_prompt_tokens`` on are the target's own."""

    token_ids: Sequence[int]
    num_prompt_tokens: int

    @property
    def num_own_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def in_batches(
    texts: Sequence[Text], max_tokens: int, padded: Callable[[int], int]
) -> list[list[Text]]:
    """Texts of similar length together, each batch of at most ``max_tokens`` once it has the
    ``padded`` length of its longest text, or of one text."""
    batches: list[list[Text]] = []
    for text in sorted(texts, key=lambda text: len(text.token_ids)):
        # The longest of its batch so far, so its length is what all are padded to.
        length = padded(len(text.token_ids))
        if not batches or (len(batches[-1]) + 1) * length > max_tokens:
            batches.append([])
        batches[-1].append(text)
    return batches
