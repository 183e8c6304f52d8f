"""The engine's side of the border: how far it runs ahead, and what it says of choices that end."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from mini_infer.core.events import Finished, PrefixCacheReset
from mini_infer.core.outputs import RequestUpdate
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.engine_loop import EngineLoop
from mini_infer.runtime.engine_main import MAX_STEPS_AHEAD
from mini_infer.runtime.engine_messages import (
    EVENT_KINDS,
    Add,
    Answer,
    Call,
    Finish,
    Listen,
    News,
)
from mini_infer.runtime.engine_process import MAX_STEPS_BEHIND
from mini_infer.runtime.engine_pulse import Pulse
from tests.runtime.engine_host import ThreadHost

NUM_TOKENS = 300


@pytest.fixture
def engine() -> LLMEngine:
    return LLMEngine.from_options(dry_run=True)


@pytest.fixture
def host(engine: LLMEngine) -> Iterator[ThreadHost]:
    host = ThreadHost(engine.core)
    yield host
    while host._thread.is_alive() and host.link.socket.poll(1):
        host.link.receive()
    host.close()


def add(engine: LLMEngine, host: ThreadHost, request_id: str = "a") -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    processed = engine.input_processor.process(request_id, "Hello", params)
    host.link.send(Add.of(request_id, processed.requests))


def news_of(host: ThreadHost) -> News:
    message = host.link.receive()
    assert isinstance(message, News)
    return message


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def test_an_engine_waits_for_a_server_that_does_not_read(
    engine: LLMEngine, host: ThreadHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0
    step = engine.core.step

    def counting() -> list[RequestUpdate]:
        nonlocal num_steps
        num_steps += 1
        return step()

    monkeypatch.setattr(engine.core, "step", counting)
    add(engine, host)
    most = MAX_STEPS_AHEAD + MAX_STEPS_BEHIND
    wait_for(lambda: num_steps >= most)
    tokens: list[int] = []
    for num_read in range(NUM_TOKENS):
        assert num_steps <= num_read + most + 1
        [update] = news_of(host).updates
        tokens += update.new_token_ids
    assert len(tokens) == NUM_TOKENS


def test_calls_are_answered_between_steps_also_of_an_idle_engine(host: ThreadHost) -> None:
    for number, (function, failure) in enumerate(
        [("reset_prefix_cache", None), ("stop_profile", "InvalidRequestError"), ("fly", "Assert")]
    ):
        arguments = ["/tmp"] if function == "stop_profile" else []
        host.link.send(Call(number, function, arguments))
        answer = host.link.receive()
        assert isinstance(answer, Answer)
        assert answer.number == number
        assert (answer.failure is None) == (failure is None)
        assert failure is None or (answer.failure and answer.failure.kind.startswith(failure))


def test_a_profile_is_waited_for_until_it_is_written(
    engine: LLMEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write one keeps the interpreter, in whatever thread."""
    pulse = Pulse()
    pulse.watch(engine.core)
    asked: list[int] = []
    loop = EngineLoop(engine.core, Mock(), pulse)

    def write(folder: Path) -> Path:
        asked.append(pulse._num_patient)
        return folder

    monkeypatch.setattr(loop._profiler, "stop", lambda: write)
    loop._call(Call(0, "stop_profile", [str(tmp_path)]))
    [(_, saved)] = loop._saves
    assert saved.result(30) == tmp_path
    assert (asked, pulse._num_patient) == ([1], 0)


def test_what_a_call_did_is_told_before_its_answer(host: ThreadHost) -> None:
    host.link.send(Listen([EVENT_KINDS.index(PrefixCacheReset)]))
    host.link.send(Call(0, "reset_prefix_cache", []))
    [event] = news_of(host).happened()
    assert isinstance(event, PrefixCacheReset)
    assert isinstance(host.link.receive(), Answer)


def test_of_what_was_never_queued_no_event_tells(host: ThreadHost) -> None:
    host.link.send(Finish(["unknown"], "abort"))
    assert news_of(host).unqueued == ["unknown"]


def test_only_events_that_somebody_listens_to_are_sent(engine: LLMEngine, host: ThreadHost) -> None:
    add(engine, host)
    assert news_of(host).events == []
    host.link.send(Listen([EVENT_KINDS.index(Finished)]))
    host.link.send(Finish(["a"], "abort"))
    events = []
    while not events:
        events = news_of(host).happened()
    assert [type(event).__name__ for event in events] == ["Finished"]
