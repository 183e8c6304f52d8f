"""Sends requests to replicas: a router, and all that it has to know."""

from collections.abc import Iterable, Sequence

from mini_infer.cache.prefix_hash import extend_block_hashes
from mini_infer.core.events import Event
from mini_infer.core.request import Request
from mini_infer.runtime.routing.prefix_index import PrefixIndex
from mini_infer.runtime.routing.replica_load import ReplicaLoad
from mini_infer.runtime.routing.router import Candidate, RoutedRequest, Router

RECENT_REQUESTS = 64
"""Of each replica: of what was given so many requests ago, a third (1 / e) still counts."""


class Dispatcher:
    """Asks a ``Router``, and keeps what it asks for: loads, and which prefixes are cached where.

    Both are read from the replicas' events, which the owner hands to ``observe``.
    """

    def __init__(self, router: Router, num_replicas: int, block_size: int) -> None:
        self._router = router
        self._block_size = block_size
        self.loads = [ReplicaLoad() for _ in range(num_replicas)]
        self._index = PrefixIndex() if router.asks_for_prefixes else None

    @property
    def kinds(self) -> tuple[type[Event], ...]:
        """Of the events that ``observe`` has to hear."""
        return ReplicaLoad.KINDS + (PrefixIndex.KINDS if self._index is not None else ())

    def block_hashes(self, request: Request) -> list[bytes]:
        """Of the blocks that a cache may spare ``request``: all full ones, but for the last token.
        On whatever thread; empty where nobody asks."""
        hashes: list[bytes] = []
        if self._index is not None and request.params.prompt_logprobs is None:
            num_tokens = request.num_prompt_tokens - 1
            num_tokens -= num_tokens % self._block_size
            prompt = request.prompt_token_ids[:num_tokens]
            extend_block_hashes(hashes, prompt, self._block_size, request.cache_salt)
        return hashes

    def send(
        self, requests: Sequence[Request], block_hashes: Sequence[bytes], running: Iterable[int]
    ) -> int:
        """Chooses the replica for the choices of one caller's request, which are its own from now
        on, among those that are ``running``.

        Raises:
            RouterError: a user's router raised, or chose what is no replica.
        """
        first = requests[0]
        num_replicas = len(self.loads)
        num_blocks = [0] * num_replicas
        if self._index is not None:
            num_blocks = self._index.num_cached_blocks(block_hashes, num_replicas)
        candidates = [
            Candidate(
                index,
                self.loads[index].num_choices,
                self.loads[index].num_tokens,
                self.loads[index].num_recent_tokens,
                num_blocks[index] * self._block_size,
            )
            for index in running
        ]
        routed = RoutedRequest(first.num_prompt_tokens, len(requests), first.priority)
        chosen = self._router.choose(routed, candidates)
        num_uncached = first.num_prompt_tokens - num_blocks[chosen] * self._block_size
        for load in self.loads:
            load.fade(1 - 1 / (RECENT_REQUESTS * num_replicas))
        self.loads[chosen].give([request.request_id for request in requests], num_uncached)
        return chosen

    def observe(self, replica: int, event: Event) -> None:
        """Takes in an event of these ``kinds``."""
        if isinstance(event, ReplicaLoad.KINDS):
            self.loads[replica].observe(event)
        elif self._index is not None:
            self._index.observe(replica, event)

    def take_back(self, replica: int, choice_ids: Iterable[str]) -> None:
        """They ended without a ``Finished``."""
        for choice_id in choice_ids:
            self.loads[replica].take_back(choice_id)

    def forget(self, replica: int) -> None:
        """Its engine is gone, with its cache and all that it was given."""
        self.loads[replica].take_all()
        if self._index is not None:
            self._index.forget(replica)
