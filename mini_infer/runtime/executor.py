"""Where steps run. One protocol; in-process here, other processes and hosts behind the same one."""

from typing import Protocol

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.outputs import StepOutput


class StepHandle(Protocol):
    """A submitted step whose result may not be known yet."""

    def result(self) -> StepOutput:
        """Waits for the step; raises whatever made it fail."""
        ...


class Executor(Protocol):
    """Runs scheduled steps in the order in which they were submitted."""

    def start(self) -> int:
        """Loads what it needs; returns the number of KV blocks that fit."""
        ...

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Starts a step; steps take effect in order of submission."""
        ...

    def shutdown(self) -> None:
        """Frees what ``start`` took; harmless when called twice."""
        ...
