"""Scheduling policies that change the engine's process which loads them, for tests from outside."""

import time
from typing import Any

from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.policy import FirstComeFirstServed


class Slow(FirstComeFirstServed):
    """Every step takes 10 ms, as a model's might."""

    def __init__(self) -> None:
        super().__init__()
        step = EngineCore.step

        def slow_step(core: EngineCore) -> Any:
            time.sleep(0.01)
            return step(core)

        EngineCore.step = slow_step  # type: ignore[method-assign]
