"""Prompt lookup: what followed the last tokens when they stood before, follows again.

Prompt-lookup decoding is Apoorv Saxena's, and LLMA (arXiv 2304.04487) is the same idea for text
that is retrieved. It costs no model, and pays where answers repeat: code that is edited, documents
that are quoted, lists, loops.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from mini_infer.core.request import Request
from mini_infer.core.speculative_config import SpeculativeConfig

FEW = 4
"""Runs that are hashed one by one; of more, columns of tokens are zipped in a third of the time."""


class NGramProposer:
    """A host's proposer (``proposer.Proposer``) that looks up the last few tokens among all before.

    The longest run of tokens that stood before decides, and of its places the latest.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = range(config.prompt_lookup_min, config.prompt_lookup_max + 1)
        self._indexes: WeakKeyDictionary[Request, _Index] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        """The first call for a request reads all of its tokens, each further one the new ones."""
        proposals = []
        for request in requests:
            index = self._indexes.get(request)
            if index is None:
                index = self._indexes[request] = _Index(self._lengths)
            index.extend(request.token_ids)
            proposals.append(index.continuation(request.token_ids, num_drafts))
        return proposals


class _Index:
    """Where each run of a few tokens ended last, for runs of several lengths.

    A token costs one entry of each length to write, and a look-up each to use: some 100 bytes each,
    far less than its KV. Keys are hashes, as tuples would double that; what is found is compared.
    """

    def __init__(self, lengths: range) -> None:
        self._last_ends: dict[int, dict[int, int]] = {length: {} for length in reversed(lengths)}
        """Of each length, longest first: hash of a run to the position behind it."""
        self._num_indexed = 0
        """Runs that end before this position are in there."""

    def extend(self, token_ids: list[int]) -> None:
        """Takes in the runs that have a token behind them by now. Tokens never change or go, also
        when a request is preempted."""
        end = len(token_ids)
        for length, last_ends in self._last_ends.items():
            start = max(self._num_indexed, length)
            if end - start < FEW:
                for place in range(start, end):
                    last_ends[hash(tuple(token_ids[place - length : place]))] = place
                continue
            columns = (
                token_ids[start - length + offset : end - length + offset]
                for offset in range(length)
            )
            runs = zip(*columns, strict=True)
            last_ends.update(zip(map(hash, runs), range(start, end), strict=True))
        self._num_indexed = end

    def continuation(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """What stood behind the last tokens before, ``num_tokens`` of it; nothing if they are new.

        Where that runs into the end of the text, it goes on with itself: a text that repeats with a
        period is continued with that period.
        """
        end = len(token_ids)
        for length, last_ends in self._last_ends.items():
            last = token_ids[-length:]
            found = last_ends.get(hash(tuple(last)))
            if found is not None and token_ids[found - length : found] == last:
                period = end - found
                followed = token_ids[found : found + num_tokens]
                return [followed[index % period] for index in range(num_tokens)]
        return []
