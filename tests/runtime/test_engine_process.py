"""The engine in its process: the same answers, and what happens when either process dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from mini_infer.core.errors import EngineDeadError, InvalidConfigError, InvalidRequestError
from mini_infer.core.events import Admitted, Answered, Event, Finished, Queued, TokensEmitted
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime import engine_restarts, silence
from mini_infer.runtime.async_engine import AsyncEngine
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.engine_process import EngineProcess, EngineStarter
from mini_infer.runtime.resolve import load_tokenizer
from tests.serving.live import wait_for

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
SLOW = {"dry_run": True, "scheduling_policy": "tests.runtime.hooks:Slow"}
POISON = {"dry_run": True, "scheduling_policy": "tests.runtime.hooks:Poison"}
HANGS = {"dry_run": True, "scheduling_policy": "tests.runtime.hooks:Hangs"}


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_restarts, "FIRST_DELAY", 0.001)


@asynccontextmanager
async def running(options: Mapping[str, Any], **more: Any) -> AsyncIterator[AsyncEngine]:
    starter = EngineStarter(options)
    tokenizer = load_tokenizer(starter.locate())
    engine = AsyncEngine([starter.start()], tokenizer, starters=[starter], **more)
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        assert process_of(engine)._process.poll() is not None
        assert not Path(process_of(engine)._folder).exists()


def process_of(engine: AsyncEngine) -> EngineProcess:
    [replica] = engine.replicas.replicas
    process = replica._host
    assert isinstance(process, EngineProcess)
    return process


async def text_of(engine: AsyncEngine, prompt: str, params: SamplingParams = SHORT) -> str:
    stream = engine.generate(prompt, params, request_id=f"{prompt}-{time.monotonic_ns()}")
    return "".join([delta.text async for delta in stream])


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.002)


async def test_answers_are_those_of_an_engine_in_this_process() -> None:
    cases: list[tuple[str, SamplingParams]] = [
        ("Hello", SHORT),
        ("Hello", SamplingParams(n=3, seed=5, max_tokens=20)),
        ("stop", SamplingParams(temperature=0, max_tokens=200, stop=["e w", "a"])),
        ("logprobs", SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)),
        ("bias", SamplingParams(temperature=0, max_tokens=5, logit_bias={97: 50.0})),
        ("words", SamplingParams(temperature=0, max_tokens=60, bad_words=["the", "a"])),
    ]
    here = LLMEngine.from_options(dry_run=True, seed=3)
    expected = []
    for index, (prompt, params) in enumerate(cases):
        for stream in (True, False):
            here.add_request(f"{index}{stream}", prompt, params, stream=stream)
            deltas = []
            while here.has_unfinished():
                deltas += here.step()
            expected.append([(d.index, d.text, d.token_ids, d.logprobs) for d in deltas])
            output = deltas[-1].output
            assert output is not None
            expected.append([output.outputs, output.prompt_logprobs, output.num_cached_tokens])
    got: list[Any] = []
    async with running({"dry_run": True, "seed": 3}) as engine:
        for index, (prompt, params) in enumerate(cases):
            for stream in (True, False):
                lists = engine.stream({f"{index}{stream}": prompt}, params, stream=stream)
                deltas = [delta async for deltas in lists for delta in deltas]
                got.append([(d.index, d.text, d.token_ids, d.logprobs) for d in deltas])
                output = deltas[-1].output
                assert output is not None
                assert output.metrics.first_token_time is not None
                assert output.metrics.finished_time is not None
                got.append([output.outputs, output.prompt_logprobs, output.num_cached_tokens])
    assert got == expected


async def test_a_stop_string_ends_the_request_in_the_engine_and_nothing_is_shown_after() -> None:
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True, stop=["e"])
    finished: list[Event] = []
    async with running(SLOW) as engine:
        engine.events.subscribe(finished.append, Finished)
        text = await text_of(engine, "Hello", params)
        await until(lambda: bool(finished))
    assert text
    assert "e" not in text
    [end] = finished
    assert isinstance(end, Finished)
    assert (end.reason, end.num_output_tokens < len(text) + 5) == ("stop", True)


async def test_events_cross_the_border_complete_and_in_order() -> None:
    events: list[Event] = []
    async with running({"dry_run": True}) as engine:
        engine.events.subscribe(events.append)
        await asyncio.gather(*(text_of(engine, f"prompt {index}") for index in range(5)))
    for kind in (Queued, Admitted, Finished, Answered):
        assert len({e.request_id for e in events if isinstance(e, kind)}) == 5
    tokens: Counter[str] = Counter()
    for event in events:
        if isinstance(event, TokensEmitted):
            tokens[event.request_id] += len(event.token_ids)
            assert isinstance(event.token_ids, tuple)
            assert event.num_output_tokens == tokens[event.request_id]
    assert set(tokens.values()) == {8}
    for kind in {type(event) for event in events}:
        times = [event.time for event in events if type(event) is kind]
        assert times == sorted(times)


async def test_hanging_up_aborts_in_the_engine() -> None:
    finished: list[Any] = []
    async with running(SLOW) as engine:
        engine.events.subscribe(finished.append, Finished)
        async with aclosing(engine.generate("Hello", ENDLESS, request_id="a")) as deltas:
            await anext(deltas)
        assert await text_of(engine, "next")
        assert finished[0].reason == "abort"
        assert finished[0].num_output_tokens < 5
        # The id is free again at once, and news of the old request are not the new one's.
        again = [d async for d in engine.generate("Hello", SHORT, request_id="a")]
        assert len(again[-1].output.outputs[0].token_ids) == 8  # type: ignore[union-attr]


async def test_what_cannot_be_sent_is_refused() -> None:
    async with running({"dry_run": True}) as engine:
        for params in (
            SamplingParams(max_tokens=4, top_k=10**30),
            SamplingParams(max_tokens=4, stop=["\ud800"]),
        ):
            with pytest.raises(InvalidRequestError, match="passed on"):
                await text_of(engine, "x", params)
        assert engine._waiting_room.num_waiting == 0
        assert await text_of(engine, "y")


async def test_a_killed_engine_fails_its_requests_and_is_started_again() -> None:
    events: list[Event] = []
    async with running(SLOW) as engine:
        engine.events.subscribe(events.append, Queued, Finished, Answered)
        expected = await text_of(engine, "Hello")
        streams = [engine.generate("Hello", ENDLESS, request_id=f"{index}") for index in range(3)]
        for stream in streams:
            await anext(stream)
        first = process_of(engine)
        os.kill(first.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="killed by SIGKILL and is being restarted"):
                async for _ in stream:
                    pass
        assert not engine.healthy
        with pytest.raises(EngineDeadError):
            await text_of(engine, "Hello")
        await until(lambda: engine.healthy)
        assert process_of(engine).pid != first.pid
        assert await text_of(engine, "Hello") == expected
        assert engine._waiting_room.num_waiting == 0
        assert not engine.replicas.replicas[0].choices._choices
        assert not Path(first._folder).exists()
    queued = [event.request_id for event in events if isinstance(event, Queued)]
    ends = {e.request_id: e.reason for e in events if isinstance(e, Finished)}
    assert sorted(ends) == sorted(queued)
    assert [ends[f"{index}"] for index in range(3)] == ["error"] * 3
    answers = {e.request_id: e.reason for e in events if isinstance(e, Answered)}
    assert answers == ends


@pytest.mark.parametrize(
    ("prompt", "why"),
    [("loop", "hung in a step"), ("lock", r"hung \(no sign of life for \d s\)")],
)
async def test_a_hung_engine_is_a_dead_one(
    prompt: str, why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(HANGS) as engine:
        expected = await text_of(engine, "Hello")
        first = process_of(engine)
        monkeypatch.setattr(silence, "SILENCE_SECONDS", 2.0)
        with pytest.raises(EngineDeadError, match=f"{why} and is being restarted"):
            await text_of(engine, prompt)
        assert not is_alive(first.pid)
        await until(lambda: engine.healthy)
        assert process_of(engine).pid != first.pid
        assert await text_of(engine, "Hello") == expected
    log = capfd.readouterr().err
    assert ("hooks.py" in log) == (prompt == "loop"), "where it hung, while somebody could tell"


async def test_a_stopped_engine_is_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running({"dry_run": True}) as engine:
        first = process_of(engine)
        os.kill(first.pid, signal.SIGSTOP)
        monkeypatch.setattr(silence, "SILENCE_SECONDS", 0.5)
        with pytest.raises(EngineDeadError, match=r"hung .* and is being restarted"):
            await text_of(engine, "Hello")
        monkeypatch.undo()
        assert not is_alive(first.pid)
        await until(lambda: engine.healthy)
        assert await text_of(engine, "Hello")


def test_an_engine_that_stops_while_it_loads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = EngineStarter({"dry_run": True})
    process = starter.spawn()
    wait_for(lambda: silence.PAGE.unpack_from(process._silence._page)[0] > 0)
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(silence, "PATIENT_SECONDS", 0.5)
    monkeypatch.setattr(silence, "SILENCE_SECONDS", 0.5)
    with pytest.raises(EngineDeadError, match=r"hung .* while it loaded the model"):
        starter.start()
    assert not is_alive(process.pid)
    assert not Path(process._folder).exists()


async def test_calls_of_a_killed_engine_fail() -> None:
    async with running(SLOW) as engine:
        call = asyncio.create_task(engine.reset_prefix_cache())
        os.kill(process_of(engine).pid, signal.SIGSTOP)
        await asyncio.sleep(0)
        os.kill(process_of(engine).pid, signal.SIGKILL)
        await asyncio.wait([call])
        if call.exception():  # else it was quicker
            assert isinstance(call.exception(), EngineDeadError)
        await until(lambda: engine.healthy)
        await engine.reset_prefix_cache()


async def test_a_device_that_fails_is_an_engine_that_dies() -> None:
    async with running(POISON) as engine:
        with pytest.raises(EngineDeadError, match=r"failed \(EngineDeadError\)"):
            await text_of(engine, "fatal")
        await until(lambda: engine.healthy)
        assert await text_of(engine, "Hello")


async def test_a_poison_request_fails_alone() -> None:
    async with running(POISON) as engine:
        alone = [await text_of(engine, f"prompt {index}") for index in range(6)]
        bad = asyncio.create_task(text_of(engine, "poison"))
        together = await asyncio.gather(*(text_of(engine, f"prompt {i}") for i in range(6)))
        assert together == alone
        stream = engine.generate("poison", SHORT, request_id="poison")
        assert [delta.finish_reason async for delta in stream] == ["error"]
        assert await bad == ""
        assert engine.healthy


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (InvalidConfigError("the disk is gone"), "the disk is gone"),
        (MemoryError(), "MemoryError"),
        (KeyError("whatever"), "whatever"),
    ],
)
async def test_an_engine_that_cannot_be_restarted_is_given_up(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, why: str
) -> None:
    async with running(SLOW) as engine:
        starts: list[EngineStarter] = []

        def fail(starter: EngineStarter) -> EngineProcess:
            starts.append(starter)
            raise failure

        monkeypatch.setattr(EngineStarter, "start", fail)
        os.kill(process_of(engine).pid, signal.SIGKILL)
        await engine.replicas.given_up.wait()
        assert len(starts) == 5
        with pytest.raises(EngineDeadError, match=f"{why}.*; 5 restarts did not help"):
            await text_of(engine, "Hello")


async def test_what_is_left_of_an_engine_keeps_no_other_from_starting() -> None:
    dead, starter, restarted = Mock(), Mock(), Mock()
    dead.close.side_effect = OSError("no")
    restarts = engine_restarts.Restarts(starter, restarted, Mock())
    assert "is being restarted" in restarts.begin("died", dead)
    await until(lambda: restarted.called)
    restarted.assert_called_once_with(starter.start())


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if is_alive(child.pid)}


async def test_shutdown_while_it_restarts_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children()
    async with running(SLOW) as engine:
        monkeypatch.setattr(engine_restarts, "FIRST_DELAY", 100.0)
        os.kill(process_of(engine).pid, signal.SIGKILL)
        await until(lambda: not engine.healthy)
    monkeypatch.setattr(engine_restarts, "FIRST_DELAY", 0.001)
    async with running(SLOW) as engine:
        os.kill(process_of(engine).pid, signal.SIGKILL)
        await until(lambda: engine.replicas.replicas[0]._restarts._num_restarts == 1)
    await until(lambda: children() <= before)


def test_an_engine_without_a_socket_is_ended() -> None:
    before = children()
    starter = EngineStarter({"dry_run": True})
    Path(starter.spawn()._folder).rmdir()
    with pytest.raises(EngineDeadError, match="no socket"):
        starter.start()
    assert children() <= before


async def test_signals_are_the_servers_to_obey() -> None:
    async with running({"dry_run": True}) as engine:
        process = process_of(engine)
        assert os.getsid(process.pid) == process.pid, "a terminal's Ctrl-C does not reach it"
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        assert await text_of(engine, "Hello")
        assert process._process.poll() is None


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("loading", [False, True])
def test_an_engine_does_not_outlive_its_server(loading: bool) -> None:
    program = f"""
import os, signal
from mini_infer.runtime.engine_process import EngineProcess
process = EngineProcess({{"dry_run": True}})
if not {loading}:
    process.locate()
    process.finish()
print(process.pid, process._folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    pid, folder = done.stdout.split()
    deadline = time.monotonic() + 10
    while is_alive(int(pid)) or (not loading and Path(folder.decode()).exists()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_an_engine_can_not_load_is_the_same_error_here() -> None:
    with pytest.raises(InvalidConfigError, match="block_size must be 1 or more, got 0"):
        EngineStarter({"dry_run": True, "block_size": 0}).start()


def test_a_process_that_dies_while_it_loads_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mini_infer.runtime.engine_process.PROGRAM", "import sys; sys.exit(3)")
    with pytest.raises(EngineDeadError, match="ended with exit code 3 while it loaded the model"):
        EngineStarter({"dry_run": True}).start()
