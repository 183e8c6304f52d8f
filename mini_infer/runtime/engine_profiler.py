"""A running engine, recorded by torch's profiler for Perfetto (https://ui.perfetto.dev)."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mini_infer.core.errors import InvalidRequestError


class EngineProfiler:
    """Records between ``start`` and ``stop``. torch records the thread that starts it, so both are
    called by the thread that runs the steps; torch is imported by the first ``start``."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._num_files = 0

    def start(self) -> None:
        """From now on steps, layers and kernels are recorded, which slows them down.

        Raises:
            InvalidRequestError: a recording runs, or there is no torch.
        """
        if self._profile is not None:
            raise InvalidRequestError("a profile is being recorded: stop it first")
        try:
            import torch

            from mini_infer.modeling.profiling import enable_ranges
        except ImportError:
            raise InvalidRequestError("there is nothing to profile without torch") from None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        _synchronize()  # kernels launched before would be in the trace without their step
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        enable_ranges("profiler")
        self._profile = profile

    def stop(self) -> Callable[[Path], Path]:
        """Ends the recording. What it returns writes a file into a folder, on any thread.

        Raises:
            InvalidRequestError: nothing is being recorded.
        """
        if self._profile is None:
            raise InvalidRequestError("no profile is being recorded: start one first")
        from mini_infer.modeling.profiling import disable_ranges

        profile, self._profile = self._profile, None
        disable_ranges()
        _synchronize()  # kernels of the last step would be missing
        profile.stop()
        self._num_files += 1
        name = f"mini-infer-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._num_files}"

        def save(folder: Path) -> Path:
            path = folder / f"{name}.json.gz"
            profile.export_chrome_trace(str(path))
            return path

        return save


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
