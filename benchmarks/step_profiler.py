"""Records some steps of a running engine as a trace for Perfetto (https://ui.perfetto.dev)."""

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from kernel_trace import NUM_LAYERS, name_layers

from mini_infer import LLM
from mini_infer.core.events import Event, StepCompleted
from mini_infer.modeling.profiling import disable_ranges, enable_ranges


class StepProfiler:
    """A context around an engine's work: after ``skip`` steps it records ``steps`` of them.

    Every step, and every layer that Python launches, has a named range. What is recorded is slowed
    down by it: a profiled run's figures are no result.
    """

    def __init__(self, llm: LLM, path: Path, skip: int, steps: int) -> None:
        """``path`` ends in .json or .json.gz; its folder is made."""
        self._llm = llm
        self._path = path
        self._skip = skip
        self._steps = steps
        self._num_seen = 0
        self._profile: Any = None
        self._written = False

    def __enter__(self) -> "StepProfiler":
        enable_ranges("profiler")
        self._llm.engine.events.subscribe(self._observe, StepCompleted)
        if self._skip == 0:
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._llm.engine.events.unsubscribe(self._observe)
        disable_ranges()
        if self._profile is not None:
            self._stop()
        if not self._written:
            print(f"no trace: {self._num_seen} steps ran, {self._skip} of them are skipped")

    def _observe(self, event: Event) -> None:
        if not isinstance(event, StepCompleted):
            return
        self._num_seen += 1
        if self._num_seen == self._skip:
            self._start()
        elif self._num_seen == self._skip + self._steps and self._profile is not None:
            self._stop()

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        _synchronize()  # kernels launched before would be in the trace without their step
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def _stop(self) -> None:
        _synchronize()  # kernels of the last step would be missing
        layers = self._llm.engine.config.model_config.num_layers
        self._profile.add_metadata_json(NUM_LAYERS, str(layers))
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        name_layers(self._path)
        self._profile = None
        self._written = True
        print(f"trace of {self._num_seen - self._skip} steps: {self._path}")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
