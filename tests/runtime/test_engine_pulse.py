"""An engine's signs of life: what is silence, what is a hang, and what only takes long."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
    ranks: Any = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert limit(TINY_MODEL, 1, **ranks) > 60, "ranks may compile, and are watched"


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("mini_infer.runtime.silence.time.monotonic", lambda: self.now)


def test_what_silence_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, page = Clock(monkeypatch), tmp_path / "page"
    watcher = Silence(page)

    def seconds_until_found(most: float = 1000.0) -> float:
        begin = clock.now
        while clock.now < begin + most:
            clock.now += silence.LOOK_SECONDS
            if watcher.look():
                break
        return clock.now - begin

    assert seconds_until_found() == 1000, "no page yet: the interpreter is coming up"
    page.write_bytes(PAGE.pack(0, 1))
    assert seconds_until_found() == 1000, "no beat yet"
    page.write_bytes(PAGE.pack(1, 1))
    assert seconds_until_found() == pytest.approx(silence.PATIENT_SECONDS, abs=2)
    page.write_bytes(PAGE.pack(2, 0))
    assert seconds_until_found() == pytest.approx(silence.SILENCE_SECONDS, abs=2)
    for beat in range(3, 100):
        page.write_bytes(PAGE.pack(beat, 0))
        assert seconds_until_found(silence.SILENCE_SECONDS - 1) == silence.SILENCE_SECONDS - 1
    clock.now += 3600  # the lid was closed
    assert watcher.look() is None
    page.unlink()
    assert seconds_until_found() == 1000, "the process is gone: others tell how"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pulse, "BEAT_SECONDS", 0.002)
    monkeypatch.setattr(step_limit, "STEP_SECONDS", 0.05)


class Hung(threading.Event):
    """Set once the pulse has found a hang."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        pulse.start(lambda seconds: self.set())


def beats_of(page: Path) -> int:
    return int(PAGE.unpack(page.read_bytes())[0])


@pytest.mark.usefixtures("quick")
def test_a_loop_that_gets_on_beats_and_one_that_does_not_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page"
    pulse = Pulse(page)
    hung = Hung(pulse)
    pulse.begin()  # before the model is loaded, nobody knows how long anything takes
    assert not hung.wait(0.15)
    assert PAGE.unpack(page.read_bytes())[1] == 1
    pulse.end()
    pulse.watch(Mock(config=make_config(), under_way=[]))
    assert PAGE.unpack(page.read_bytes())[1] == 0
    for _ in range(40):  # many short steps are no long one
        pulse.begin()
        assert not hung.wait(0.002)
        pulse.end()
    assert not hung.wait(0.15), "an idle loop does not hang"
    with pulse.patience():
        assert PAGE.unpack(page.read_bytes())[1] == 1
        assert not hung.wait(0.15), "a profile is put together"
    assert PAGE.unpack(page.read_bytes())[1] == 0
    before = beats_of(page)
    pulse.begin()
    assert hung.wait(PATIENCE)
    assert beats_of(page) > before


def compiling(until: threading.Event) -> Callable[[], object]:
    """A function in whose stack Triton compiles until the event is set."""
    code = (lambda: until.wait(PATIENCE)).__code__.replace(co_name="compile")
    module = {"__name__": "triton.compiler.compiler", "PATIENCE": PATIENCE}
    return FunctionType(code, module, closure=(CellType(until),))


@pytest.mark.usefixtures("quick")
def test_a_kernel_that_is_compiled_is_waited_for() -> None:
    pulse, done = Pulse(), threading.Event()
    hung = Hung(pulse)

    def loop() -> None:
        pulse.watch(Mock(config=make_config(), under_way=[]))
        pulse.begin()
        compiling(done)()
        done.clear()
        done.wait(PATIENCE)

    thread = threading.Thread(target=loop)
    thread.start()
    assert not hung.wait(0.3)
    done.set()
    assert hung.wait(PATIENCE), "it goes on, and then hangs"
    done.set()
    thread.join()


def test_without_a_page_it_works_unwatched() -> None:
    pulse = Pulse(Path("/nowhere/page"))
    with pulse.patience():
        pulse.begin()
