"""An engine's signs of life: what is silence, what is a hang, and what only takes long."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any
from unittest.mock import Mock

import pytest

from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.core.model_config import ModelConfig
from mini_infer.runtime import engine_process, engine_pulse, silence, step_limit
from mini_infer.runtime.engine_pulse import Pulse
from mini_infer.runtime.silence import PAGE, Silence
from tests.runtime.fake_executor import TINY_MODEL, make_config
from tests.serving.live import PATIENCE

LIMIT = 10.0
"""Seconds from a hang to its error."""
EIGHT_B = replace(
    TINY_MODEL,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)


def limit(model: ModelConfig, num_tokens: int, computed: int = 0, **options: Any) -> float:
    config = replace(make_config(**options), model_config=model)
    return step_limit.step_limit(
        config, [ScheduledBatch(0, (Chunk("a", 0, computed, num_tokens),))]
    )


def test_the_limits_leave_room() -> None:
    looks = 2 * silence.LOOK_SECONDS
    assert silence.SILENCE_SECONDS + looks + engine_process.KILL_SECONDS < LIMIT
    assert step_limit.STEP_SECONDS + 2 * engine_pulse.BEAT_SECONDS + looks < LIMIT
    assert silence.SILENCE_SECONDS / engine_pulse.BEAT_SECONDS >= 20, "beats that may be late"


def test_a_step_may_take_what_its_work_takes_on_a_slow_machine() -> None:
    assert limit(TINY_MODEL, 1) < 9
    assert limit(EIGHT_B, 1) == pytest.approx(8 + 15, abs=1), "a token has 15 billion operations"
    # Two cores do 100 GFLOP/s or more: a prompt is some 300 s of work, 1,200 s on a machine that
    # is loaded four times.
    assert limit(EIGHT_B, 2048) > 20_000
    assert limit(EIGHT_B, 1, computed=100_000) > limit(EIGHT_B, 1) + 50
    on_gpu: Any = {"device": "cuda", "dtype": "bfloat16"}
    assert limit(EIGHT_B, 64, **on_gpu) < LIMIT
    assert limit(EIGHT_B, 8192, **on_gpu) > 100
    assert step_limit.step_limit(make_config(), []) == step_limit.STEP_SECONDS
    assert limit(TINY_MODEL, 1, distributed_executor_backend="mp") > 60, (
        "ranks may compile, and are watched"
    )


def test_a_stage_may_take_as_long_for_a_layer() -> None:
    """Of 128 tokens, on a core that does 2 GFLOP/s for us: 28 s."""
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 64}
    assert step_limit.layer_limit(make_config(**options)) < 0.1
    config = replace(make_config(**options), model_config=EIGHT_B)
    assert step_limit.layer_limit(config) > 2 * 28


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("mini_infer.runtime.silence.time.monotonic", lambda: self.now)


@pytest.fixture
def page() -> Iterator[mmap.mmap]:
    descriptor = silence.shared_memory(PAGE.size)
    with mmap.mmap(descriptor, PAGE.size) as page:
        yield page
    os.close(descriptor)


def test_what_silence_is(page: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watcher = Silence(page)

    def seconds_until_found(most: float = 1000.0) -> float:
        begin = clock.now
        while clock.now < begin + most:
            clock.now += silence.LOOK_SECONDS
            if watcher.look():
                break
        return clock.now - begin

    assert seconds_until_found() == 1000, "no beat yet: the interpreter is coming up"
    PAGE.pack_into(page, 0, 1, 1)
    assert seconds_until_found() == pytest.approx(silence.PATIENT_SECONDS, abs=2)
    PAGE.pack_into(page, 0, 2, 0)
    assert seconds_until_found() == pytest.approx(silence.SILENCE_SECONDS, abs=2)
    for beat in range(3, 100):
        PAGE.pack_into(page, 0, beat, 0)
        assert seconds_until_found(silence.SILENCE_SECONDS - 1) == silence.SILENCE_SECONDS - 1
    clock.now += 3600  # the lid was closed
    assert watcher.look() is None


def test_what_took_patience_is_no_silence_afterwards(
    page: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that beats may not have had its turn yet."""
    clock, pulse, watcher = Clock(monkeypatch), Pulse(page), Silence(page)
    pulse.watch(Mock())
    with pulse.patience():
        for _ in range(100):
            clock.now += silence.LOOK_SECONDS
            assert watcher.look() is None
    assert watcher.look() is None


class Ticks:
    """The clock of a pulse, which runs when the test says so; ``found`` is for how long it hung."""

    def __init__(self) -> None:
        self.now, self.found = 0.0, 0.0
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)

    def start(self, pulse: Pulse) -> None:
        pulse.start(self._end)
        assert self._waits.acquire(timeout=PATIENCE)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._waits.release()
        self._go.acquire()
        self.now += seconds

    def run(self, seconds: float) -> bool:
        """Is a hang found within these?"""
        end = self.now + seconds
        while self.now < end and not self.found:
            self._go.release()
            assert self._waits.acquire(timeout=PATIENCE)
        return bool(self.found)

    def _end(self, stuck: float) -> None:
        self.found = stuck
        self._waits.release()


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr(engine_pulse, "time", ticks)
    return ticks


def test_a_loop_that_gets_on_beats_and_one_that_does_not_is_found(
    page: mmap.mmap, ticks: Ticks
) -> None:
    pulse = Pulse(page)
    ticks.start(pulse)

    def written() -> tuple[int, bool]:
        num_beats, num_patient = PAGE.unpack_from(page)
        return num_beats, bool(num_patient)

    pulse.begin()  # before the model is loaded, nobody knows how long anything takes
    assert not ticks.run(1000)
    assert written() == (1000 / engine_pulse.BEAT_SECONDS + 2, True)
    pulse.end()
    pulse.watch(Mock(config=make_config(), under_way=[]))
    assert not written()[1]
    for _ in range(20):  # many short steps are no long one
        pulse.begin()
        assert not ticks.run(5)
        pulse.end()
    assert not ticks.run(1000), "an idle loop does not hang"
    with pulse.patience():
        with pulse.patience():
            assert not ticks.run(1000), "a profile is put together"
        assert written()[1], "another one is still being written"
    assert not written()[1]
    pulse.begin()
    ticks.now += 3600  # the lid was closed
    assert not ticks.run(5)
    assert ticks.run(LIMIT)
    assert step_limit.STEP_SECONDS < ticks.found < LIMIT


def test_a_step_with_more_work_may_take_longer(ticks: Ticks) -> None:
    chunk = Chunk("a", 0, 0, 1)
    config = replace(make_config(), model_config=EIGHT_B)
    pulse = Pulse()
    ticks.start(pulse)
    pulse.watch(Mock(config=config, under_way=[ScheduledBatch(0, (chunk, chunk))]))
    pulse.begin()
    assert not ticks.run(30)
    assert ticks.run(20)


def compiling(until: threading.Event) -> Callable[[], object]:
    """A function in whose stack Triton compiles until the event is set."""
    code = (lambda: until.wait(PATIENCE)).__code__.replace(co_name="compile")
    module = {"__name__": "triton.compiler.compiler", "PATIENCE": PATIENCE}
    return FunctionType(code, module, closure=(CellType(until),))


def test_a_kernel_that_is_compiled_is_waited_for(ticks: Ticks) -> None:
    pulse, begun, compiled = Pulse(), threading.Event(), threading.Event()
    ticks.start(pulse)

    def loop() -> None:
        pulse.watch(Mock(config=make_config(), under_way=[]))
        pulse.begin()
        begun.set()
        compiling(compiled)()

    thread = threading.Thread(target=loop)
    thread.start()
    assert begun.wait(PATIENCE)
    assert not ticks.run(engine_pulse.COMPILE_SECONDS - 10)
    compiled.set()
    thread.join()
    assert ticks.run(1), "it goes on, and then hangs"


def test_without_a_page_it_works_unwatched() -> None:
    pulse = Pulse()
    with pulse.patience():
        pulse.begin()
