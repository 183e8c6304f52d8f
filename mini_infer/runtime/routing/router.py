"""Routers: which of a server's replicas gets a request."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mini_infer.core.errors import InvalidConfigError, RouterError
from mini_infer.core.user_code import why_not_loaded


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router is told of a caller's request, whose choices stay together."""

    num_prompt_tokens: int
    num_choices: int
    priority: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that runs, as it stands for one request."""

    index: int
    num_choices: int
    """That it was given and that have not ended."""
    load: int
    """Tokens that it was given to compute, of those choices: see ``ReplicaLoad``."""
    num_recent_tokens: float
    """That it was given of late, ended choices too; what is long ago counts less and less."""
    num_cached_tokens: int
    """Of this request's prompt; 0 unless the router ``asks_for_prefixes``."""


class Router(Protocol):
    """Chooses replicas. Select your own with ``--router module:Class``."""

    @property
    def asks_for_prefixes(self) -> bool:
        """Must ``num_cached_tokens`` be known? Engines then tell which prefixes they hold."""
        ...

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        """The ``index`` of one of the (non-empty) ``replicas``. Called in the server's event loop,
        for everybody: it must not wait."""
        ...


class _Guarded:
    """A user's router, whose mistakes become typed errors of the request that met them."""

    def __init__(self, router: Router, name: str) -> None:
        self.asks_for_prefixes = bool(getattr(router, "asks_for_prefixes", True))
        self._router = router
        self._name = name

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        try:
            index = self._router.choose(request, replicas)
        except Exception as error:
            raise RouterError(
                f"router {self._name}: choose() raised {type(error).__name__}: {error}"
            ) from error
        if not any(index == replica.index for replica in replicas):
            raise RouterError(
                f"router {self._name}: choose() must return the index of one of the replicas, not "
                f"{index!r:.80}"
            )
        return index


def load_router(name: str) -> Router:
    """Builds the router called ``name``: a built-in one, or a user's as ``module:Class``.

    Raises:
        InvalidConfigError: no such router, or the class lacks ``choose``.
    """
    from mini_infer.runtime.routing.least_loaded import LeastLoaded
    from mini_infer.runtime.routing.prefix_aware import PrefixAware
    from mini_infer.runtime.routing.round_robin import RoundRobin

    built_in: dict[str, type[Router]] = {
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "prefix_aware": PrefixAware,
    }
    if name in built_in:
        return built_in[name]()
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise InvalidConfigError(
            f"router {name!r} is unknown: use {', '.join(built_in)}, or your own as module:Class"
        )
    try:
        router: Any = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:  # it is the user's code, and may raise anything
        raise InvalidConfigError(
            f"router {name!r} can't be loaded: {why_not_loaded(error)}"
        ) from error
    if not callable(getattr(router, "choose", None)):
        raise InvalidConfigError(f"router {name!r} lacks choose()")
    return _Guarded(router, name)
