"""Scheduling policies: who runs first, and who gives up its blocks when they run out."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from mini_infer.core.errors import InvalidConfigError, PolicyError
from mini_infer.core.request import Request
from mini_infer.core.user_code import why_not_loaded


class SchedulingPolicy(Protocol):
    """Orders requests. Select your own with ``scheduling_policy="module:Class"``."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Smaller runs first; of equal ones the first to arrive. Asked once, when the request
        arrives. The request with the smallest is never preempted, so a step always makes
        progress."""
        ...

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """Picks one of the (non-empty) candidates to lose its blocks. All of them rank after the
        request that needs the blocks."""
        ...

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        """May a request that waits take the place of one that runs and ranks after it?"""
        ...


class FirstComeFirstServed:
    """Arrival order; the newest is preempted first; nobody is displaced by a newcomer."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.arrival,)

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        return max(candidates, key=lambda request: request.rank)

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        return False


class Priority(FirstComeFirstServed):
    """Lower ``priority`` first, arrival order within one; a newcomer displaces lower ranks."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.priority, request.arrival)

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        return newcomer.priority < running.priority


BUILT_IN: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
}


class _Guarded:
    """A user's policy, whose mistakes become typed errors of the request that met them: in the
    scheduler an exception of any other kind would end the engine, with everybody's requests."""

    def __init__(self, policy: SchedulingPolicy, name: str) -> None:
        self._policy = policy
        self._name = name

    def key(self, request: Request) -> tuple[float, ...]:
        key: Any = self._ask("key", request)
        numbers = isinstance(key, tuple) and all(
            isinstance(part, int | float) and part == part for part in key
        )
        if not numbers:
            raise self._error("key", f"it must return a tuple of numbers, not {key!r:.80}")
        return cast("tuple[float, ...]", key)

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        victim: Any = self._ask("choose_victim", candidates)
        if not any(victim is candidate for candidate in candidates):
            raise self._error("choose_victim", "it must return one of the candidates")
        return cast("Request", victim)

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        answer: Any = self._ask("may_displace", newcomer, running)
        try:
            return bool(answer)
        except Exception as error:  # an array of several truths, for example
            raise self._error("may_displace", "it must return True or False") from error

    def _ask(self, method: str, *args: object) -> object:
        try:
            return getattr(self._policy, method)(*args)
        except Exception as error:
            raise self._error(method, f"it raised {type(error).__name__}: {error}") from error

    def _error(self, method: str, fault: str) -> PolicyError:
        return PolicyError(f"scheduling policy {self._name}, method {method}(): {fault}")


def load_policy(name: str) -> SchedulingPolicy:
    """Builds the policy called ``name``: a built-in one, or a user's as ``module:Class``.

    Raises:
        InvalidConfigError: no such policy, or the class lacks a method of the protocol.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module_name, _, class_name = name.partition(":")
    if not class_name:
        known = ", ".join(BUILT_IN)
        raise InvalidConfigError(
            f"scheduling_policy {name!r} is unknown: use {known}, or your own as module:Class"
        )
    try:
        policy: Any = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:  # it is the user's code, and may raise anything
        raise InvalidConfigError(
            f"scheduling_policy {name!r} can't be loaded: {why_not_loaded(error)}"
        ) from error
    missing = [
        method
        for method in ("key", "choose_victim", "may_displace")
        if not callable(getattr(policy, method, None))
    ]
    if missing:
        raise InvalidConfigError(f"scheduling_policy {name!r} lacks {', '.join(missing)}()")
    return _Guarded(policy, name)
