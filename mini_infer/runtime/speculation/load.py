"""From a ``SpeculativeConfig`` to a proposer on the host."""

import importlib
from collections.abc import Sequence
from itertools import islice
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

from mini_infer.core.errors import InvalidConfigError, ProposerError
from mini_infer.core.request import Request
from mini_infer.core.speculative_config import BUILT_IN_METHODS, SpeculativeConfig
from mini_infer.core.user_code import why_not_loaded
from mini_infer.runtime.speculation.ngram import NGramProposer
from mini_infer.runtime.speculation.proposer import Proposer


def load_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer:
    """The proposer of ``config.method``, which is one that runs on the host.

    A user's own raises ``ProposerError``, and nothing else, from ``propose``: where it raises
    itself, or returns no drafts of a vocabulary of ``vocab_size`` tokens.

    Raises:
        InvalidConfigError: a user's class can't be loaded or built, or has no ``propose``.
    """
    if config.method == "ngram":
        return NGramProposer(config)
    proposer_class = load_proposer_class(config.method)
    try:
        proposer = proposer_class(config)
    except Exception as error:  # it is the user's code, and may raise anything
        raise InvalidConfigError(
            f"speculative_config: {config.method} can't be built: {type(error).__name__}: {error}; "
            f"it is given one argument, the SpeculativeConfig"
        ) from error
    return _Guarded(proposer, config.method, vocab_size)


def load_proposer_class(method: str) -> type:
    """The class that a user's ``module:Class`` names. It runs on the device if it says
    ``on_device = True``, else on the host.

    Raises:
        InvalidConfigError: it can't be loaded, or has no ``propose``.
    """
    module_name, _, class_name = method.partition(":")
    if not module_name or not class_name:
        known = ", ".join(BUILT_IN_METHODS)
        raise InvalidConfigError(
            f"speculative_config has no method {method!r:.80}: use {known}, or your own as "
            f"module:Class"
        )
    try:
        proposer_class: Any = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # it is the user's code, and may raise anything
        raise InvalidConfigError(
            f"speculative_config: method {method!r} can't be loaded: {why_not_loaded(error)}"
        ) from error
    if not isinstance(proposer_class, type):
        raise InvalidConfigError(f"speculative_config: method {method!r} is not a class")
    if not callable(getattr(proposer_class, "propose", None)):
        raise InvalidConfigError(f"speculative_config: method {method!r} lacks propose()")
    return proposer_class


class _Guarded:
    """A user's proposer, whose mistakes become typed errors: of any other kind they would end the
    engine, with everybody's requests."""

    def __init__(self, proposer: Proposer, name: str, vocab_size: int) -> None:
        self._proposer = proposer
        self._name = name
        self._vocab_size = vocab_size
        self._kept: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()
        """A copy of each request's tokens, which costs no more than the new ones a step."""

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        for request in requests:
            kept = self._kept.setdefault(request, [])
            kept += request.token_ids[len(kept) :]
        try:
            # Not a token is read beyond what was asked for: an iterator may go on for ever.
            answer = islice(self._proposer.propose(requests, num_drafts), len(requests) + 1)
            proposals = [tuple(map(index, islice(drafts, num_drafts))) for drafts in answer]
        except Exception as error:
            raise self._error(f"{type(error).__name__}: {error}") from error
        finally:
            changed = self._put_back(requests)
        if changed:
            raise self._error("it changed a request's token_ids: copy them first")
        if len(proposals) != len(requests):
            raise self._error(
                f"it must return drafts for each request, {len(requests)} here, and returned "
                f"{'more' if len(proposals) > len(requests) else len(proposals)}"
            )
        for drafts in proposals:
            if drafts and not 0 <= min(drafts) <= max(drafts) < self._vocab_size:
                raise self._error(
                    f"{list(drafts)} are not all tokens: ids go from 0 to {self._vocab_size - 1}"
                )
        return proposals

    def _put_back(self, requests: Sequence[Request]) -> bool:
        """Makes tokens as many again as they were, where some were appended or taken away: they are
        the engine's, which would wait for ever for steps of theirs. Were there any?"""
        changed = False
        for request in requests:
            kept = self._kept[request]
            if len(request.token_ids) != len(kept):
                request.token_ids[:] = kept
                changed = True
        return changed

    def _error(self, fault: str) -> ProposerError:
        return ProposerError(f"speculative proposer {self._name}, method propose(): {fault}")
