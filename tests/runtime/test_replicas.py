"""Several engines as one: answers, who gets what, and what happens when some of them die."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import pytest

from mini_infer.core.errors import (
    ClusterResourcesError,
    EngineDeadError,
    InvalidConfigError,
    RouterError,
)
from mini_infer.core.events import (
    Admitted,
    Answered,
    BlockEvicted,
    BlocksCached,
    Event,
    Finished,
    Queued,
    Rerouted,
    TokensEmitted,
)
from mini_infer.core.outputs import RequestUpdate
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime import engine_restarts
from mini_infer.runtime.async_engine import AsyncEngine
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.engine_client import ServerEvents
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.engine_messages import EVENT_KINDS, Listen
from mini_infer.runtime.replica_starters import (
    ReplicaStarters,
    common_config,
    replica_environment,
)
from mini_infer.runtime.routing.router import Candidate, RoutedRequest, load_router
from tests.runtime.engine_host import ThreadHost
from tests.runtime.test_async_engine import ENDLESS, SHORT, until

LONG = "A prompt of many blocks, whose beginning is worth to be found in a cache. " * 10


class Starters:
    """Makes engines, and remembers them."""

    def __init__(self, **options: Any) -> None:
        self.options = {"dry_run": True, "num_kv_blocks": 1024, **options}
        self.engines: list[LLMEngine] = []
        self.fails = False

    def start(self) -> ThreadHost:
        if self.fails:
            raise InvalidConfigError("the disk is gone")
        self.engines.append(LLMEngine.from_options(**self.options))
        return ThreadHost(self.engines[-1].core)

    def cancel(self) -> None:
        """Nothing takes long."""


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_restarts, "FIRST_DELAY", 0.001)


@pytest.fixture
def opened() -> Iterator[list[AsyncEngine]]:
    engines: list[AsyncEngine] = []
    yield engines
    for engine in engines:
        engine.shutdown()


def replicas_of(
    starters: Starters, opened: list[AsyncEngine], num: int = 2, **options: Any
) -> AsyncEngine:
    hosts = [starters.start() for _ in range(num)]
    tokenizer = starters.engines[0].tokenizer
    engine = AsyncEngine(hosts, tokenizer, starters=[starters] * num, **options)
    opened.append(engine)
    return engine


def heard(engine: AsyncEngine, *kinds: type[Event]) -> list[list[Any]]:
    """By replica, what its engine tells from now on."""
    events: list[list[Any]] = []
    for of_engine in engine.events.engines:
        events.append([])
        of_engine.subscribe(events[-1].append, *kinds)
    return events


async def outputs_of(engine: AsyncEngine, prompts: Sequence[str], **params: Any) -> list[Any]:
    given = SamplingParams(**{"max_tokens": 12, "seed": 3, "ignore_eos": True, **params})

    async def one(index: int, prompt: str) -> Any:
        stream = engine.stream({f"{index}": prompt}, given, stream=index % 2 == 0)
        deltas = [delta async for deltas in stream for delta in deltas]
        return deltas[-1].output.outputs  # type: ignore[union-attr]

    return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


def dying(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, num_steps: int = 0
) -> Callable[[], None]:
    """Has an engine take ``num_steps`` steps of requests, and no other until it is told to die."""
    step, die = core.step, threading.Event()

    def few() -> list[RequestUpdate]:
        nonlocal num_steps
        if num_steps:
            num_steps -= core.has_unfinished()
            return step()
        assert die.wait(30)
        raise RuntimeError("gone")

    monkeypatch.setattr(core, "step", few)
    return die.set


async def test_answers_do_not_depend_on_how_many_there_are(opened: list[AsyncEngine]) -> None:
    prompts = [f"{LONG}{index % 3}" for index in range(12)]
    expected = await outputs_of(replicas_of(Starters(), opened, 1), prompts, n=2)
    for router in ("round_robin", "least_loaded", "prefix_aware"):
        engine = replicas_of(Starters(), opened, 3, router=load_router(router))
        events = heard(engine, Queued)
        assert await outputs_of(engine, prompts, n=2) == expected
        assert sum(map(len, events)) == 24
        assert all(len(told) >= 2 for told in events)
        for told in events:  # choices of one prompt stay together
            callers = [event.caller_id for event in told]
            assert all(callers.count(caller) == 2 for caller in callers)


async def test_a_prompt_goes_where_its_beginning_is(opened: list[AsyncEngine]) -> None:
    engine = replicas_of(Starters(), opened, 4, router=load_router("prefix_aware"))
    events = heard(engine, Admitted)
    for question in ("What?", "Who?", "Why?"):
        await outputs_of(engine, [LONG + question])
    assert sorted(map(len, events)) == [0, 0, 0, 3]
    [told] = [told for told in events if told]
    assert [event.num_cached_tokens > 0 for event in told] == [False, True, True]
    await engine.reset_prefix_cache()
    await outputs_of(engine, [LONG])
    assert sorted(map(len, events)) == [0, 0, 1, 3], "it is forgotten, and others had less to do"


async def test_one_engine_tells_nothing_for_a_router(opened: list[AsyncEngine]) -> None:
    starters = Starters()
    engine = replicas_of(starters, opened, 1, router=load_router("prefix_aware"))
    await outputs_of(engine, [LONG])
    events = starters.engines[0].core.events
    assert not any(events.wants(kind) for kind in (BlocksCached, BlockEvicted, TokensEmitted))
    pair = replicas_of(starters, opened, 2, router=load_router("prefix_aware"))
    await outputs_of(pair, [LONG, LONG])
    events = starters.engines[-1].core.events
    assert all(events.wants(kind) for kind in (BlocksCached, BlockEvicted, TokensEmitted))


async def test_hanging_up_aborts_where_it_runs(opened: list[AsyncEngine]) -> None:
    starters = Starters()
    engine = replicas_of(starters, opened)
    for request_id in ("a", "b"):
        async with aclosing(engine.generate("Hello", ENDLESS, request_id=request_id)) as deltas:
            await anext(deltas)
    await until(lambda: not any(one.core.has_unfinished() for one in starters.engines))
    await outputs_of(engine, ["Hello"] * 2)


async def test_a_death_ends_what_had_begun_and_moves_the_rest(
    opened: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    starters = Starters(max_num_seqs=2)
    engine = replicas_of(starters, opened)
    expected = await outputs_of(engine, [LONG, "Hello"])
    told: list[Event] = []
    engine.events.subscribe(told.append, Finished, Answered)
    die = dying(starters.engines[0].core, monkeypatch, num_steps=1)
    begun = engine.generate("begun", ENDLESS, request_id="begun")  # replica 0
    await anext(begun)
    others = asyncio.create_task(
        outputs_of(engine, ["x", LONG, "y", "Hello"])  # 1, 0, 1, 0
    )
    await asyncio.sleep(0)
    await until(lambda: len(engine.replicas._in_flight) == 3)
    die()
    with pytest.raises(EngineDeadError, match=r"replica 0 failed \(RuntimeError\) and is being re"):
        await anext(begun)
    _, first, _, second = await others
    assert [first, second] == expected
    assert engine.healthy
    assert engine._waiting_room.num_waiting == 0
    await until(lambda: all(one.running for one in engine.replicas.replicas))
    assert not any(one.choices._choices for one in engine.replicas.replicas)
    assert [load.num_choices for load in engine.replicas._dispatcher.loads] == [0, 0]
    ends = [(e.request_id, e.reason) for e in told if isinstance(e, Finished)]
    assert sorted(ends) == sorted([("begun", "error"), *((f"{i}", "length") for i in range(4))])
    answers = [(e.request_id, e.reason) for e in told if isinstance(e, Answered)]
    assert sorted(answers) == sorted(ends)
    await outputs_of(engine, ["Hello"] * 4)
    assert len(starters.engines) == 3
    assert starters.engines[2].core.scheduler.cache.num_used_blocks == 0


async def test_an_answer_that_nobody_saw_a_part_of_is_computed_anew(
    opened: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a stream it is not begun before it ends, also where the server reads its tokens."""
    starters = Starters()
    engine = replicas_of(starters, opened)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=["no such text"])

    async def answer(request_id: str) -> Any:
        stream = engine.stream({request_id: "Hello"}, params, stream=False)
        [delta] = [delta async for deltas in stream for delta in deltas]
        return delta.text, delta.token_ids, delta.output

    die = dying(starters.engines[0].core, monkeypatch, num_steps=9)
    asked = asyncio.create_task(answer("a"))
    told = heard(engine, Rerouted)
    await until(lambda: engine.replicas._outputs.num_output_tokens().get("a") == 9)
    die()
    text, token_ids, output = await asked
    assert [event.request_id for event in told[0]] == ["a"]
    assert (text, token_ids) == (await answer("b"))[:2]
    assert len(token_ids) == 30
    assert output.outputs[0].text == text


async def test_who_was_there_at_two_deaths_moves_no_more(
    opened: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    starters = Starters()
    engine = replicas_of(starters, opened, 3)
    for one in starters.engines[:2]:
        dying(one.core, monkeypatch)()
    with pytest.raises(EngineDeadError, match="replica 1 failed"):
        await anext(engine.generate("killer", SHORT, request_id="a"))
    assert engine.replicas.replicas[2].running
    assert engine._waiting_room.num_waiting == 0


async def test_the_last_to_die_takes_all_along(
    opened: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    starters = Starters()
    engine = replicas_of(starters, opened)
    engine.start()
    starters.fails = True
    dying(starters.engines[0].core, monkeypatch)()
    assert len(await outputs_of(engine, ["moves"])) == 1
    await until(lambda: engine.replicas.replicas[0].given_up)
    assert not engine.replicas.given_up.is_set()
    await engine.reset_prefix_cache()
    await outputs_of(engine, ["Hello", "you"])
    dying(starters.engines[1].core, monkeypatch)()
    with pytest.raises(EngineDeadError, match="replica 1 failed"):
        await anext(engine.generate("Hello", SHORT, request_id="a"))
    await asyncio.wait_for(engine.replicas.given_up.wait(), 10)
    assert "the disk is gone; 5 restarts did not help" in (engine.replicas.why_given_up or "")
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()


async def test_a_cluster_without_room_is_asked_until_it_has_some(
    opened: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starters = Starters()
    engine = replicas_of(starters, opened, 1)
    full = Mock(side_effect=ClusterResourcesError("the cluster is full"))
    start = starters.start
    monkeypatch.setattr(starters, "start", full)
    dying(starters.engines[0].core, monkeypatch)()
    with pytest.raises(EngineDeadError, match="being restarted"):
        await anext(engine.generate("Hello", SHORT, request_id="a"))
    await until(lambda: full.call_count > 2 * engine_restarts.MAX_RESTARTS)
    assert caplog.text.count("waits for a place: the cluster is full") == 1
    monkeypatch.setattr(starters, "start", start)
    await until(lambda: engine.healthy)
    assert len(await outputs_of(engine, ["Hello"])) == 1


class Moody:
    asks_for_prefixes = False
    num_calls = 0

    def choose(self, request: RoutedRequest, replicas: Sequence[Candidate]) -> int:
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            raise ValueError("not now")
        return replicas[0].index


async def test_a_routers_mistake_is_its_requests(
    opened: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    starters = Starters()
    engine = replicas_of(starters, opened, router=load_router("tests.runtime.test_replicas:Moody"))
    with pytest.raises(RouterError, match="not now"):
        await anext(engine.stream({"a": "Hello", "b": "you"}, SHORT))
    assert engine._waiting_room.num_waiting == 0
    assert [load.num_choices for load in engine.replicas._dispatcher.loads] == [0, 0]
    dying(starters.engines[0].core, monkeypatch)()
    with pytest.raises(RouterError, match="not now"):  # when it is moved
        await anext(engine.generate("Hello", SHORT, request_id="a"))
    assert engine._waiting_room.num_waiting == 0
    assert len(await outputs_of(engine, ["Hello"])) == 1


def test_who_hears_what() -> None:
    changes: list[int] = []
    events = ServerEvents(2, lambda: changes.append(1))
    here, there, everywhere = list[Event](), list[Event](), list[Event]()
    listener = everywhere.append
    events.engines[0].subscribe(here.append, Queued, Answered)
    events.engines[1].subscribe(there.append, Queued, Answered)
    told, own = Queued(0.0, "a", 3), Answered(1.0, "a", "stop")
    for times in (1, 2):
        events.engines[0].emit(told)
        events.emit(own)
        assert (here, there) == ([told, own] * times, [own] * times)
        events.subscribe(listener, Queued)
    assert everywhere == [told]
    assert events.engines[1].wanted() == Listen([EVENT_KINDS.index(Queued)])
    events.unsubscribe(listener)
    events.engines[1].unsubscribe(there.append)
    assert events.engines[1].wanted() == Listen([])
    events.engines[1].emit(told)
    assert everywhere == [told]
    assert len(changes) == 6


def test_what_all_can_promise() -> None:
    configs = [
        LLMEngine.from_options(dry_run=True, num_kv_blocks=blocks).config for blocks in (9, 7, 8)
    ]
    assert common_config(configs).num_kv_blocks == 7
    object.__setattr__(configs[1], "device", "cuda")
    with pytest.raises(InvalidConfigError, match="of 3 replicas only some found a GPU"):
        common_config(configs)


def test_each_replica_has_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mini_infer.runtime.replica_starters._num_cores", lambda: 8)
    assert replica_environment({}, 0, 1) == {}
    assert replica_environment({"device": "cpu"}, 2, 3) == {"OMP_NUM_THREADS": "2"}
    four = [str(number) for number in range(4)]
    monkeypatch.setattr("mini_infer.runtime.replica_starters._gpus", lambda: four)
    assert replica_environment({}, 2, 3) == {"CUDA_VISIBLE_DEVICES": "2", "OMP_NUM_THREADS": "2"}
    two_each = {"tensor_parallel_size": 2}
    assert replica_environment(two_each, 1, 2)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,4,GPU-a,1")
    assert replica_environment(two_each, 1, 2) == {
        "CUDA_VISIBLE_DEVICES": "GPU-a,1",
        "OMP_NUM_THREADS": "5",
    }
    with pytest.raises(InvalidConfigError, match="3 replicas take 6 GPUs, and there are 4: give"):
        ReplicaStarters(two_each, 3)
    on_ray = {**two_each, "distributed_executor_backend": "ray"}
    assert replica_environment(on_ray, 1, 3) == {"OMP_NUM_THREADS": "5"}
    assert len(ReplicaStarters({"dry_run": True}, 5).each) == 5
    assert len(ReplicaStarters({"device": "cpu"}, 5).each) == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" not in replica_environment({}, 1, 2)
