"""Scheduling policies: who runs first, and who gives up its blocks when they run out."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.request import Request


class SchedulingPolicy(Protocol):
    """Orders requests. Select your own with ``scheduling_policy="module:Class"``."""

    def key(self, request: Request) -> tuple[int, ...]:
        """Smaller runs first. Constant over a request's life; of equal ones the first to arrive
        runs first. The request with the smallest is never preempted, so a step always makes
        progress."""
        ...

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """Picks one of the (non-empty) candidates to lose its blocks. All of them rank after the
        request that needs the blocks."""
        ...

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        """May a request that waits take the place of one that runs?"""
        ...


class FirstComeFirstServed:
    """Arrival order; the newest is preempted first; nobody is displaced by a newcomer."""

    def key(self, request: Request) -> tuple[int, ...]:
        return (request.arrival,)

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        return max(candidates, key=self.key)

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        return False


class Priority(FirstComeFirstServed):
    """Lower ``priority`` first, arrival order within one; a newcomer displaces lower ranks."""

    def key(self, request: Request) -> tuple[int, ...]:
        return (request.priority, request.arrival)

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        return newcomer.priority < running.priority


BUILT_IN: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
}


class _Unique:
    """A user's policy, its keys made unique: of two that rank alike neither could take the blocks
    of the other, and both would wait for ever."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.choose_victim = policy.choose_victim
        self.may_displace = policy.may_displace

    def key(self, request: Request) -> tuple[int, ...]:
        return (*self._policy.key(request), request.arrival)


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
        raise InvalidConfigError(f"scheduling_policy {name!r} can't be loaded: {error}") from error
    missing = [
        method
        for method in ("key", "choose_victim", "may_displace")
        if not callable(getattr(policy, method, None))
    ]
    if missing:
        raise InvalidConfigError(f"scheduling_policy {name!r} lacks {', '.join(missing)}()")
    return _Unique(policy)
