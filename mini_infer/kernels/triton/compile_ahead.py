"""Compiles kernels side by side, before a step needs the first of them.

A kernel takes 0.3 to 1.5 seconds to compile, and a start-up needs dozens. Most of that time is
LLVM's, ptxas's and the C compiler's (Triton 3.6 builds a launcher for each signature). None of them
holds Python's lock, so threads are enough.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

MAX_THREADS = 16
UNINITIALISED = (torch.empty, torch.empty_like, Tensor.new_empty)


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Within, a kernel that is launched is noted and not run; the end compiles all that were noted.

    So a step that is run within, on arguments of any value, compiles what a real one will launch.
    Where a kernel would write stand zeros. A kernel that fails to compile says so when it is
    launched.
    """
    launch = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, **options: Any) -> Any:
        return launch(kernel, *arguments, **(options | {"warmup": True}))

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "compile") as threads:
        compiler = _Compiler(threads)
        with _CompileMode(compiler, ignore_errors=True):
            JITFunction.run = compile_only
            try:
                with _ZeroFilled():
                    yield
            finally:
                JITFunction.run = launch
                compiler.begin()


class _ZeroFilled(TorchFunctionMode):
    """New memory is zero: what a kernel did not write must not be a wild index to the next one."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in UNINITIALISED else result


class _CompileMode(triton.AsyncCompileMode):  # type: ignore[misc]
    """Notes each kernel once: without this, a launch of a noted kernel would hash its source."""

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(kernel)
        return kernel


class _Compiler(Executor):
    """Compiles in threads, and there also loads kernels into the device.

    It waits until the last kernel is noted: threads that compile take Python's lock so often that
    the step beside them would crawl.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._device = torch.cuda.current_device()
        self._may_begin = Event()

    def submit(self, compile: Callable[[], Any], /, *_: Any, **__: Any) -> "Future[Any]":
        return self._threads.submit(self._compile_and_load, compile)

    def begin(self) -> None:
        """Lets the threads go."""
        self._may_begin.set()

    def _compile_and_load(self, compile: Callable[[], Any]) -> Any:
        self._may_begin.wait()
        torch.cuda.set_device(self._device)  # the current device is a thread's own
        kernel = compile()
        kernel.run  # noqa: B018 - Triton makes the launcher when it is first asked for
        return kernel
