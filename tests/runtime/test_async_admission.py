"""Calls of the engine's thread, who is let in, and who takes too long."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mini_infer.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    RequestTimeoutError,
    UnavailableError,
)
from mini_infer.core.outputs import RequestUpdate
from mini_infer.runtime.async_engine import OFF_LOOP_LENGTH, AsyncEngine
from mini_infer.runtime.engine import LLMEngine
from tests.runtime.engine_host import threaded
from tests.runtime.test_async_engine import ENDLESS, SHORT, blocks_in_use, text_of, until


@pytest.fixture
def engine() -> LLMEngine:
    return LLMEngine.from_options(dry_run=True, num_kv_blocks=1024)


@pytest.fixture
async def async_engine(engine: LLMEngine) -> AsyncIterator[AsyncEngine]:
    async_engine = threaded(engine)
    yield async_engine
    async_engine.shutdown()


async def test_calls_run_between_steps_and_their_errors_are_the_callers(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def fail() -> None:
        threads.append(threading.current_thread().name)
        raise InvalidRequestError("no")

    monkeypatch.setattr(engine.core, "reset_prefix_cache", fail)
    with pytest.raises(InvalidRequestError):
        await async_engine.reset_prefix_cache()
    assert threads == ["mini-infer-engine"]
    assert await text_of(async_engine, "Hello", "a")


async def test_a_call_of_a_dead_engine_fails(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it comes after the engine's end, or waits for a step that ends it."""
    stepping, die = threading.Event(), threading.Event()

    def last_step() -> list[RequestUpdate]:
        stepping.set()
        die.wait(30)
        raise RuntimeError("the engine's end")

    monkeypatch.setattr(engine.core, "step", last_step)
    request = asyncio.create_task(text_of(async_engine, "Hello", "a"))
    await until(stepping.is_set)
    call = asyncio.create_task(async_engine.reset_prefix_cache())
    await asyncio.sleep(0)
    die.set()
    for task in (request, call):
        with pytest.raises(EngineDeadError):
            await task
    with pytest.raises(EngineDeadError):
        await async_engine.reset_prefix_cache()


async def test_a_caller_that_gave_up_on_a_call_is_forgotten(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, go = threading.Event(), threading.Event()

    def wait() -> None:
        called.set()
        go.wait(30)

    monkeypatch.setattr(engine.core, "reset_prefix_cache", wait)
    call = asyncio.create_task(async_engine.reset_prefix_cache())
    await until(called.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go.set()
    assert await text_of(async_engine, "Hello", "a")


async def test_after_drain_only_running_requests_are_served(async_engine: AsyncEngine) -> None:
    deltas = async_engine.generate("Hello", SHORT, request_id="a")
    await anext(deltas)
    async_engine.drain()
    with pytest.raises(UnavailableError, match="shutting down"):
        await text_of(async_engine, "Hello", "b")
    assert [delta.finish_reason async for delta in deltas][-1] == "length"


async def test_a_request_that_takes_too_long_is_aborted(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, go = engine.core.step, threading.Event()
    monkeypatch.setattr(engine.core, "step", lambda: step() if go.wait(0.002) else [])
    async_engine = threaded(engine, request_timeout=0.001)
    with pytest.raises(RequestTimeoutError, match=r"0\.001 seconds"):
        async for _ in async_engine.generate("Hello", ENDLESS, request_id="a"):
            pass
    go.set()
    await until(lambda: not engine.has_unfinished())
    assert blocks_in_use(engine) == 0
    async_engine.shutdown()


async def test_a_request_that_is_refused_or_given_up_while_it_is_tokenised_waits_no_longer(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenising, go = threading.Event(), threading.Event()
    process = engine.input_processor.process

    def slow(*args: Any, **kwargs: Any) -> Any:
        tokenising.set()
        go.wait(30)
        return process(*args, **kwargs)

    monkeypatch.setattr(engine.input_processor, "process", slow)
    task = asyncio.create_task(text_of(async_engine, "x" * (OFF_LOOP_LENGTH + 1), "a"))
    await until(tokenising.is_set)
    assert async_engine._waiting_room.num_waiting == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert async_engine._waiting_room.num_waiting == 0
    go.set()
    with pytest.raises(PromptTooLongError):
        await text_of(async_engine, "x" * (OFF_LOOP_LENGTH + 1), "b")
    assert async_engine._waiting_room.num_waiting == 0
