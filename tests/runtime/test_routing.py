"""Routers, and what they are told: which replica holds what, and how much it has to do."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.cache.manager import KVCacheManager
from mini_infer.core.errors import InvalidConfigError, RouterError
from mini_infer.core.events import (
    Admitted,
    BlockEvicted,
    BlocksCached,
    Finished,
    PrefixCacheReset,
    TokensEmitted,
)
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.routing import prefix_aware
from mini_infer.runtime.routing.dispatcher import RECENT_REQUESTS, Dispatcher
from mini_infer.runtime.routing.prefix_index import PrefixIndex
from mini_infer.runtime.routing.replica_load import CHOICE_TOKENS, ReplicaLoad
from mini_infer.runtime.routing.router import Candidate, RoutedRequest, Router, load_router

ROUTED = RoutedRequest(num_prompt_tokens=1000, num_choices=1, priority=0)


def candidate(index: int, load: int = 0, cached: int = 0, recent: float = 0) -> Candidate:
    return Candidate(index, 1, load, recent, cached)


def request_of(tokens: Sequence[int], **fields: Any) -> Request:
    given = {"request_id": "a", "params": SamplingParams(), "seed": 0, "max_tokens": 4, **fields}
    return Request(prompt_token_ids=list(tokens), **given)


def test_round_robin_is_each_ones_turn_whoever_is_missing() -> None:
    router = load_router("round_robin")
    replicas = [candidate(index, load=99 * index) for index in range(3)]
    assert [router.choose(ROUTED, replicas) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.choose(ROUTED, [replicas[0], replicas[2]]) for _ in range(3)] == [2, 0, 2]


def test_least_loaded_takes_turns_where_all_are_idle() -> None:
    router = load_router("least_loaded")
    assert router.choose(ROUTED, [candidate(0, 5), candidate(1, 3), candidate(2, 4)]) == 1
    assert router.choose(ROUTED, [candidate(0, recent=9), candidate(1, recent=8)]) == 1


@pytest.mark.parametrize(
    ("loads", "cached", "chosen"),
    [
        ((0, 0), (0, 512), 1),  # the longest prefix
        ((0, 500), (0, 512), 1),
        ((0, 600), (0, 512), 0),  # it would wait longer than it saves
        ((700, 600), (512, 512), 1),  # both have it
        ((3, 2, 1), (0, 0, 0), 2),  # nobody has it
    ],
)
def test_the_longest_prefix_wins_unless_its_replica_is_overloaded(
    loads: tuple[int, ...], cached: tuple[int, ...], chosen: int
) -> None:
    replicas = [candidate(i, *values) for i, values in enumerate(zip(loads, cached, strict=True))]
    assert load_router("prefix_aware").choose(ROUTED, replicas) == chosen


def test_a_short_prefix_does_not_keep_a_replica_busy_while_others_idle() -> None:
    router = load_router("prefix_aware")
    idle = candidate(0)
    assert router.choose(ROUTED, [idle, candidate(1, cached=512, recent=4000)]) == 1
    assert router.choose(ROUTED, [idle, candidate(1, cached=512, recent=4100)]) == 0
    assert router.choose(ROUTED, [idle, candidate(1, cached=900, recent=4100)]) == 1


class Last:
    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        return replicas[-1].index


class Raises(Last):
    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        raise ValueError("no idea")


class Nobody(Last):
    asks_for_prefixes = False

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        return 7


def test_a_users_router_and_its_mistakes() -> None:
    replicas = [candidate(0), candidate(3)]
    router = load_router("tests.runtime.test_routing:Last")
    assert router.choose(ROUTED, replicas) == 3
    assert router.asks_for_prefixes
    with pytest.raises(RouterError, match=r"test_routing:Raises: choose\(\) raised ValueError: no"):
        load_router("tests.runtime.test_routing:Raises").choose(ROUTED, replicas)
    nobody = load_router("tests.runtime.test_routing:Nobody")
    assert not nobody.asks_for_prefixes
    with pytest.raises(RouterError, match="index of one of the replicas, not 7"):
        nobody.choose(ROUTED, replicas)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fastest", "use round_robin, least_loaded, prefix_aware, or your own as module:Class"),
        ("no.such:Thing", "can't be loaded: No module named .*PYTHONPATH"),
        ("mini_infer.core.request:Rank", "can't be loaded|lacks choose"),
        ("builtins:dict", r"lacks choose\(\)"),
    ],
)
def test_a_router_that_is_none(name: str, why: str) -> None:
    with pytest.raises(InvalidConfigError, match=why):
        load_router(name)


HASHES = [bytes([number]) for number in range(6)]
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["cache", "evict", "reset", "die"]),
        st.sets(st.sampled_from(HASHES), min_size=1),
    ),
    max_size=30,
)


@given(CHANGES, st.lists(st.sampled_from(HASHES), unique=True))
def test_the_index_is_what_the_replicas_told(
    changes: list[tuple[int, str, set[bytes]]], prompt: list[bytes]
) -> None:
    index, held = PrefixIndex(), [set[bytes]() for _ in range(3)]
    for replica, change, hashes in changes:
        if change == "cache":
            index.observe(replica, BlocksCached(0.0, "a", tuple(hashes)))
            held[replica] |= hashes
        elif change == "evict":
            for block_hash in hashes & held[replica]:
                index.observe(replica, BlockEvicted(0.0, 1, block_hash))
            held[replica] -= hashes
        else:
            if change == "reset":
                index.observe(replica, PrefixCacheReset(0.0))
            else:
                index.forget(replica)
            held[replica].clear()
    expected = [
        next((i for i, item in enumerate(prompt) if item not in mine), len(prompt)) for mine in held
    ]
    assert index.num_cached_blocks(prompt, 3) == expected
    assert len(index) == len(set().union(*held))


def test_a_load_is_what_is_left_to_do() -> None:
    load = ReplicaLoad()
    load.give(["a#0", "a#1"], 100)
    assert (load.num_choices, load.num_tokens) == (2, 100 + 2 * CHOICE_TOKENS)
    load.observe(Admitted(0.0, "a#0", 120, 50))  # the cache had another word
    load.observe(Admitted(0.0, "a#1", 120, 112))
    assert load.num_tokens == 70 + 8 + 2 * CHOICE_TOKENS
    load.observe(TokensEmitted(0.0, "a#0", (1,), 1))
    load.observe(TokensEmitted(0.0, "a#0", (1,), 2))
    assert load.num_tokens == 8 + 2 * CHOICE_TOKENS
    load.observe(Finished(0.0, "a#0", "stop", 120, 2))
    load.take_back("a#0")
    load.observe(Admitted(0.0, "stranger", 9, 0))
    assert (load.num_choices, load.num_tokens) == (1, 8 + CHOICE_TOKENS)
    load.take_back("a#1")
    assert (load.num_choices, load.num_tokens) == (0, 0)
    assert load.num_recent_tokens == 78 + 2 * CHOICE_TOKENS
    load.fade(0.5)
    assert load.num_recent_tokens == 39 + CHOICE_TOKENS
    load.give(["b"], 9)
    load.take_all()
    assert (load.num_choices, load.num_tokens) == (0, 0)


class Told(Last):
    asks_for_prefixes = True

    def __init__(self) -> None:
        self.candidates: Sequence[Candidate] = ()

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        self.candidates = replicas
        return replicas[0].index


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 100])
def test_what_a_router_is_told_is_what_the_cache_will_find(length: int) -> None:
    """The same hashes, the last token left out, salt and all."""
    engine = LLMEngine.from_options(dry_run=True)
    router = Told()
    dispatcher = Dispatcher(router, 2, engine.config.block_size)
    engine.events.subscribe(lambda event: dispatcher.observe(1, event), *dispatcher.kinds)
    prompt = list(range(100))
    params = SamplingParams(max_tokens=1)
    engine.add_request("first", prompt, params, cache_salt="one")
    while engine.has_unfinished():
        engine.step()
    cache: KVCacheManager = engine.core.scheduler.cache
    for salt in ("one", "other"):
        request = request_of(prompt[:length], cache_salt=salt)
        found = cache.match_prefix(request).num_tokens
        dispatcher.send([request], dispatcher.block_hashes(request), [0, 1])
        assert [one.num_cached_tokens for one in router.candidates] == [0, found]
        assert (found > 0) == (salt == "one" and length > 16)
    all_logprobs = request_of(prompt, params=SamplingParams(prompt_logprobs=1), cache_salt="one")
    assert dispatcher.block_hashes(all_logprobs) == []
    dispatcher.forget(1)
    request = request_of(prompt, cache_salt="one")
    dispatcher.send([request], dispatcher.block_hashes(request), [0, 1])
    assert [one.num_cached_tokens for one in router.candidates] == [0, 0]


@pytest.mark.parametrize(("weight", "most"), [(None, 1.04), (0.0, 8.0)])
def test_a_system_prompt_does_not_gather_everybody_at_one_replica(
    weight: float | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time, so that load is no reason to go elsewhere."""
    if weight is not None:
        monkeypatch.setattr(prefix_aware, "RECENT_WEIGHT", weight)
    dispatcher, counts = Dispatcher(load_router("prefix_aware"), 8, 512), [0] * 8
    rng = random.Random(1)
    for number in range(400):
        own = [number] * rng.randint(200, 2000)
        request = request_of([*range(2048), *own], request_id=f"{number}")
        hashes = dispatcher.block_hashes(request)
        chosen = dispatcher.send([request], hashes, range(8))
        counts[chosen] += 1
        for event in (
            TokensEmitted(0.0, request.request_id, (1,), 1),
            BlocksCached(0.0, request.request_id, tuple(hashes)),
            Finished(0.0, request.request_id, "stop", len(request.prompt_token_ids), 1),
        ):
            dispatcher.observe(chosen, event)
    assert max(counts) / 50 == pytest.approx(most, rel=0.03)


def test_what_was_given_long_ago_counts_less() -> None:
    dispatcher = Dispatcher(load_router("round_robin"), 2, 16)
    for number in range(1000):
        dispatcher.send([request_of(range(100), request_id=f"{number}")], [], [0])
    assert dispatcher.loads[0].num_tokens == 1000 * (100 + CHOICE_TOKENS)
    recent = dispatcher.loads[0].num_recent_tokens
    assert recent == pytest.approx(2 * RECENT_REQUESTS * (100 + CHOICE_TOKENS), rel=0.01)
    assert dispatcher.loads[1].num_recent_tokens == 0


def test_who_does_not_ask_for_prefixes_pays_nothing_for_them() -> None:
    router: Router = load_router("least_loaded")
    dispatcher = Dispatcher(router, 2, 16)
    assert BlocksCached not in dispatcher.kinds
    assert dispatcher.block_hashes(request_of(range(100))) == []
    assert dispatcher.send([request_of(range(100))], [], [1]) == 1
