"""Named ranges of a step and of its layers, for a profiler's timeline.

Off, which is the default, a range is one shared object that does nothing. ``enable_ranges`` turns
them on for torch's profiler (Perfetto) or for NVIDIA's (NVTX, Nsight Systems); so does the
environment variable ``MINI_INFER_NVTX=1``, for a process that cannot be asked otherwise::

    MINI_INFER_NVTX=1 nsys profile --trace cuda,nvtx mini-infer serve ...

A replayed CUDA graph runs no Python, so the layers inside it have no ranges: look at them with
``enforce_eager``, or let ``benchmarks/trace_summary.py`` find them in the repeating kernels.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from mini_infer.core.batch import ScheduledBatch

Kind = Literal["profiler", "nvtx"]
Range = AbstractContextManager[Any]

NVTX_VARIABLE = "MINI_INFER_NVTX"
_NOTHING: Range = nullcontext()
_open_range: Callable[[str], Range] | None = None


def enable_ranges(kind: Kind) -> None:
    """From now on steps and layers are named: to torch's profiler, or as NVTX ranges."""
    global _open_range
    _open_range = torch.profiler.record_function if kind == "profiler" else torch.cuda.nvtx.range


def disable_ranges() -> None:
    """Ranges cost nothing again."""
    global _open_range
    _open_range = None


def step_range(batch: ScheduledBatch) -> Range:
    """A context around all that is launched for ``batch``."""
    if _open_range is None:
        return _NOTHING
    return _open_range(
        f"step {batch.step_id}: {len(batch.chunks)} requests, {batch.num_tokens} tokens"
    )


def layer_range(index: int) -> Range:
    """A context around the launches of the layer at depth ``index``."""
    return _NOTHING if _open_range is None else _open_range(f"layer {index}")


if os.environ.get(NVTX_VARIABLE) == "1":
    enable_ranges("nvtx")
