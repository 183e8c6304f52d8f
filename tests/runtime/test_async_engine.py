"""The engine and the event loop: delivery, aborts, failures. Here the engine is in a thread,
so that tests can reach into it; ``test_engine_process.py`` has it in its process."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

import pytest

from mini_infer.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    SlowReaderError,
)
from mini_infer.core.outputs import RequestDelta, RequestUpdate
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.async_engine import OFF_LOOP_LENGTH, AsyncEngine
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.engine_messages import News
from mini_infer.runtime.replica import Replica
from tests.runtime.engine_host import threaded

SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


@pytest.fixture
def engine() -> LLMEngine:
    """A dry run at the pace of a model: on a quick machine 4,000 invented tokens are no time."""
    engine = LLMEngine.from_options(dry_run=True, num_kv_blocks=1024)
    step, pace = engine.core.step, threading.Event()

    def paced_step() -> list[RequestUpdate]:
        pace.wait(0.001)
        return step()

    engine.core.step = paced_step  # type: ignore[method-assign]
    return engine


@pytest.fixture
async def async_engine(engine: LLMEngine) -> AsyncIterator[AsyncEngine]:
    async_engine = threaded(engine)
    yield async_engine
    async_engine.shutdown()


async def text_of(async_engine: AsyncEngine, prompt: str, request_id: str) -> str:
    deltas = async_engine.generate(prompt, SHORT, request_id=request_id)
    return "".join([delta.text async for delta in deltas])


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.001)


def blocks_in_use(engine: LLMEngine) -> int:
    return engine.scheduler.cache.num_used_blocks


async def test_deltas_are_those_of_the_engine(async_engine: AsyncEngine) -> None:
    engine = LLMEngine.from_options(dry_run=True)
    engine.add_request("a", "Hello", SHORT)
    expected: list[RequestDelta] = []
    while engine.has_unfinished():
        expected += engine.step()
    deltas = [item async for item in async_engine.generate("Hello", SHORT, request_id="a")]
    assert [(d.text, d.token_ids, d.finish_reason) for d in deltas] == [
        (d.text, d.token_ids, d.finish_reason) for d in expected
    ]
    assert deltas[-1].output is not None


async def test_concurrent_requests_get_their_own_answers(async_engine: AsyncEngine) -> None:
    prompts = [f"Prompt number {i}" for i in range(20)]
    alone = [await text_of(async_engine, prompt, prompt) for prompt in prompts]
    together = await asyncio.gather(*(text_of(async_engine, p, p) for p in prompts))
    assert together == alone
    assert len(set(alone)) > 10


async def test_closing_the_iterator_aborts_and_frees(
    engine: LLMEngine, async_engine: AsyncEngine
) -> None:
    async with aclosing(async_engine.generate("Hello", ENDLESS, request_id="a")) as deltas:
        await anext(deltas)
        assert blocks_in_use(engine) > 0
    await until(lambda: not engine.has_unfinished())
    assert blocks_in_use(engine) == 0
    assert await text_of(async_engine, "next", "a")


async def test_cancelling_the_task_aborts(engine: LLMEngine, async_engine: AsyncEngine) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in async_engine.generate("Hello", ENDLESS, request_id="a"):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not engine.has_unfinished())
    assert blocks_in_use(engine) == 0


async def test_regression_11_abort_with_n_2_stops_both_choices(
    engine: LLMEngine, async_engine: AsyncEngine
) -> None:
    params = SamplingParams(n=2, max_tokens=4000, ignore_eos=True)
    seen: set[int] = set()
    async with aclosing(async_engine.generate("Hello", params, request_id="a")) as deltas:
        async for delta in deltas:
            seen.add(delta.index)
            if seen == {0, 1}:
                break
    await until(lambda: not engine.has_unfinished())
    assert blocks_in_use(engine) == 0


async def test_a_refused_prompt_is_raised_and_others_go_on(async_engine: AsyncEngine) -> None:
    other = asyncio.create_task(text_of(async_engine, "Hello", "other"))
    with pytest.raises(PromptTooLongError):
        await text_of(async_engine, "x" * 9000, "long")
    with pytest.raises(InvalidRequestError):
        await text_of(async_engine, "Hello\ud800", "surrogate")
    assert await other


async def test_an_engine_that_refuses_to_add_fails_that_request_only(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine.core.add

    def refuse(requests: Sequence[Request]) -> None:
        if requests[0].request_id == "bad":
            raise InvalidRequestError("never fits", "prompt")
        add(requests)

    monkeypatch.setattr(engine.core, "add", refuse)
    good, bad = await asyncio.gather(
        text_of(async_engine, "Hello", "good"),
        text_of(async_engine, "Hello", "bad"),
        return_exceptions=True,
    )
    assert isinstance(good, str)
    assert isinstance(bad, InvalidRequestError)
    assert bad.param == "prompt"
    assert async_engine.healthy


async def test_a_failing_step_ends_all_requests_and_later_ones(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[RequestUpdate]:
        raise RuntimeError("the device fell over")

    monkeypatch.setattr(engine.core, "step", fail)
    results = await asyncio.gather(
        *(text_of(async_engine, "Hello", f"{i}") for i in range(3)), return_exceptions=True
    )
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert "failed (RuntimeError)" in str(results[0])
    assert "fell over" not in str(results[0]), "a client need not see the inside"
    assert not async_engine.healthy
    with pytest.raises(EngineDeadError):
        await text_of(async_engine, "Hello", "later")


async def test_shutdown_ends_running_requests(engine: LLMEngine) -> None:
    async_engine = threaded(engine)
    deltas = async_engine.generate("Hello", ENDLESS, request_id="a")
    await anext(deltas)
    async_engine.shutdown()
    async_engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in deltas:
            pass
    assert not async_engine.healthy


async def test_shutdown_before_the_first_request(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(engine.core, "shutdown", lambda: calls.append("shutdown"))
    async_engine = threaded(engine)
    async_engine.shutdown()
    async_engine.shutdown()
    assert calls == ["shutdown"]
    with pytest.raises(EngineDeadError):
        await text_of(async_engine, "Hello", "a")


async def test_a_step_is_one_message(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_with_news = 0
    messages: list[News] = []
    step, on_news = engine.core.step, async_engine.replicas.on_news

    def counting_step() -> list[RequestUpdate]:
        nonlocal steps_with_news
        updates = step()
        steps_with_news += bool(updates)
        return updates

    def counting(replica: Replica, news: News) -> None:
        messages.append(news)
        on_news(replica, news)

    monkeypatch.setattr(engine.core, "step", counting_step)
    monkeypatch.setattr(async_engine.replicas, "on_news", counting)
    await asyncio.gather(*(text_of(async_engine, "Hello", f"{i}") for i in range(8)))
    assert sum(bool(news.updates) for news in messages) == steps_with_news
    assert steps_with_news < 8 * 8


async def test_an_idle_engine_takes_no_steps(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = engine.core.step

    def counting_step() -> list[RequestUpdate]:
        nonlocal steps
        steps += 1
        return step()

    monkeypatch.setattr(engine.core, "step", counting_step)
    await text_of(async_engine, "Hello", "a")
    after_answer = steps
    await asyncio.sleep(0.02)
    assert steps == after_answer
    assert await text_of(async_engine, "Hello", "b")


async def test_a_slow_consumer_does_not_hold_the_engine_up(
    engine: LLMEngine, async_engine: AsyncEngine
) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    async with aclosing(async_engine.stream({"slow": "Hello"}, params)) as stream:
        deltas = await anext(stream)
        await until(lambda: not engine.has_unfinished())
        async for more in stream:
            deltas += more
    assert [len(deltas), deltas[-1].finish_reason] == [50, "length"]


async def test_who_does_not_read_is_given_up_before_its_answer_fills_the_memory(
    engine: LLMEngine, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer.runtime.replica_set.MAX_BACKLOG", 40)
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True, logprobs=4)
    async with aclosing(async_engine.stream({"slow": "Hello"}, params)) as stream:
        await anext(stream)
        await until(lambda: not engine.has_unfinished())
        assert blocks_in_use(engine) == 0
        assert len(await anext(stream)) < 20, "what there was is still read"
        with pytest.raises(SlowReaderError, match="read too slowly"):
            await anext(stream)
    assert await text_of(async_engine, "Hello", "slow")


async def test_a_batch_is_served_whole_or_not_at_all(
    engine: LLMEngine, async_engine: AsyncEngine
) -> None:
    prompts = {"a": "Hello", "b": "World"}
    finished = [
        delta.request_id
        async for deltas in async_engine.stream(prompts, SHORT)
        for delta in deltas
        if delta.output
    ]
    assert sorted(finished) == ["a", "b"]
    queued: list[object] = []
    engine.events.subscribe(queued.append)
    with pytest.raises(InvalidRequestError):
        async for _ in async_engine.stream({"a": "Hello", "b": []}, SHORT):
            pass
    assert queued == []


async def test_a_request_id_in_use_is_refused(async_engine: AsyncEngine) -> None:
    async with aclosing(async_engine.generate("Hello", ENDLESS, request_id="a")) as deltas:
        await anext(deltas)
        with pytest.raises(InvalidRequestError, match="in use"):
            await text_of(async_engine, "Hello", "a")
        assert (await anext(deltas)).request_id == "a"


async def test_a_second_event_loop_is_refused(async_engine: AsyncEngine) -> None:
    assert await text_of(async_engine, "Hello", "a")

    def elsewhere() -> None:
        asyncio.run(text_of(async_engine, "Hello", "b"))

    with pytest.raises(RuntimeError, match="one event loop"):
        await asyncio.to_thread(elsewhere)


@pytest.mark.parametrize(("length", "off_loop"), [(10, False), (OFF_LOOP_LENGTH + 1, True)])
async def test_long_prompts_are_tokenised_off_the_loop(
    engine: LLMEngine,
    async_engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    off_loop: bool,
) -> None:
    threads: list[int] = []
    process = engine.input_processor.process

    def recording(*args: object, **kwargs: object) -> object:
        threads.append(threading.get_ident())
        return process(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.input_processor, "process", recording)
    outcome = await asyncio.gather(text_of(async_engine, "x" * length, "a"), return_exceptions=True)
    assert isinstance(outcome[0], PromptTooLongError if off_loop else str)
    assert [thread != threading.get_ident() for thread in threads] == [off_loop]


def test_the_thread_ends_when_its_event_loop_is_gone(
    engine: LLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async_engine = threaded(engine)

    async def leave_running() -> None:
        deltas = async_engine.generate("Hello", ENDLESS, request_id="a")
        await anext(deltas)

    asyncio.run(leave_running())
    async_engine.shutdown()
    assert not async_engine.healthy
    assert not caplog.records


async def test_without_stream_an_answer_is_one_delta_at_its_end(async_engine: AsyncEngine) -> None:
    text = await text_of(async_engine, "Hello", "streamed")
    stream = async_engine.stream({"whole": "Hello"}, SHORT, stream=False)
    [[delta]] = [deltas async for deltas in stream]
    assert delta.output is not None
    assert delta.text == delta.output.outputs[0].text == text
    assert delta.finish_reason == "length"
