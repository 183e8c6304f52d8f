"""Scheduling policies that change the engine's process which loads them, for tests from outside."""

import ctypes
import time
from typing import Any

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.errors import EngineDeadError
from mini_infer.runtime import step_limit
from mini_infer.runtime.dry_run import DryRunExecutor
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.policy import FirstComeFirstServed


class Slow(FirstComeFirstServed):
    """Every step takes 10 ms, as a model's might."""

    def __init__(self) -> None:
        step = EngineCore.step

        def slow_step(core: EngineCore) -> Any:
            time.sleep(0.01)
            return step(core)

        EngineCore.step = slow_step  # type: ignore[method-assign]


class Poison(FirstComeFirstServed):
    """A prompt with "poison" in it makes each of its steps raise; one with "fatal", the device."""

    def __init__(self) -> None:
        submit, bad = DryRunExecutor.submit, {b"poison": set[str](), b"fatal": set[str]()}

        def failing(executor: DryRunExecutor, batch: ScheduledBatch) -> Any:
            for word, requests in bad.items():
                for admission in batch.admissions:
                    if word in bytes(item for item in admission.token_ids if item < 256):
                        requests.add(admission.request_id)
                if any(chunk.request_id in requests for chunk in batch.chunks):
                    raise EngineDeadError("gone") if word == b"fatal" else RuntimeError("a secret")
            return submit(executor, batch)

        DryRunExecutor.submit = failing  # type: ignore[method-assign]


class Hangs(FirstComeFirstServed):
    """A step of a prompt with "loop" in it never ends; with "lock", nor does it let go of the
    interpreter's lock. Steps that never end are found soon."""

    def __init__(self) -> None:
        step_limit.STEP_SECONDS = 0.5
        submit = DryRunExecutor.submit

        def hanging(executor: DryRunExecutor, batch: ScheduledBatch) -> Any:
            for admission in batch.admissions:
                prompt = bytes(item for item in admission.token_ids if item < 256)
                while b"loop" in prompt:
                    time.sleep(0.01)
                if b"lock" in prompt:
                    ctypes.PyDLL(None).pause()
            return submit(executor, batch)

        DryRunExecutor.submit = hanging  # type: ignore[method-assign]
