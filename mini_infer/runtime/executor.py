"""Where steps run. One protocol; in-process here, other processes and hosts behind the same one."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.outputs import StepOutput

if TYPE_CHECKING:
    from mini_infer.core.step_costs import StepCosts


class StepHandle(Protocol):
    """A submitted step whose result may not be known yet."""

    def result(self) -> StepOutput:
        """Waits for the step; raises whatever made it fail."""
        ...


@runtime_checkable
class MaskedStepHandle(StepHandle, Protocol):
    """A step whose batch has ``masked`` chunks: it is computed but for its sampling."""

    def sample(self, masks: bytearray) -> None:
        """Samples. Called once, before ``result`` and before the next step is submitted.

        ``masks`` holds a row of bits for each masked chunk (``grammar.fill_masks``), and one more
        for each of its drafts: the tokens that it may sample there. They come late so that they are
        filled while a device is busy.
        """
        ...


class Executor(Protocol):
    """Runs scheduled steps in the order in which they were submitted."""

    def start(self) -> int:
        """Loads what it needs; returns the number of KV blocks that fit."""
        ...

    def step_costs(self) -> "StepCosts | None":
        """What steps with drafts take, measured; None where that is not known. After ``start``."""
        ...

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Starts a step; steps take effect in order of submission."""
        ...

    def shutdown(self) -> None:
        """Frees what ``start`` took; harmless when called twice."""
        ...


@runtime_checkable
class WatchedExecutor(Executor, Protocol):
    """An executor that may lose what runs its steps while none runs."""

    def look(self) -> None:
        """Looks whether all are there, without waiting. To be asked about twice a second while no
        step is in flight: so an engine does not promise what its next request would find gone.

        Raises:
            EngineDeadError: one has ended, or gives no sign of life.
        """
        ...
