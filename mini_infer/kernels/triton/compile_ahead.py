"""Compiles kernels side by side, before a step needs the first of them.

A kernel takes 0.1 to 3 seconds to compile, and a start-up needs dozens. Threads would wait for each
other: Triton's front end and a part of what follows hold Python's lock, and sixteen of them were
three times as fast as one. So forks compile, each with an interpreter of its own, and leave what
they compiled in Triton's cache on disk, where threads of this process pick it up. (A new
interpreter would first import torch, which takes longer than a kernel.)
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from triton.compiler import ASTSource
from triton.runtime import build
from triton.runtime.jit import JITFunction

from mini_infer.kernels.triton.forks import run_in_forks

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

    compiler = _Compiler()
    with _CompileMode(compiler, ignore_errors=True):
        JITFunction.run = compile_only
        try:
            with _ZeroFilled():
                yield
        finally:
            JITFunction.run = launch
            compiler.compile()


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


class _NotCompiledError(Exception):
    """A kernel is not in Triton's cache."""


class _Noted:
    """A kernel that a step launches."""

    def __init__(self, compile: Callable[[], Any]) -> None:
        self.compile = compile
        self.future: Future[Any] = Future()

    def load(self) -> None:
        """Compiles it, where it is not in the cache, and loads it into the device."""
        try:
            kernel = self.compile()
            kernel.run  # noqa: B018 - Triton makes the launcher when it is first asked for
            self.future.set_result(kernel)
        except _NotCompiledError:
            pass
        except Exception as error:
            self.future.set_exception(error)


class _Compiler(Executor):
    """Notes what to compile, in the order in which it is asked for."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    def submit(self, compile: Callable[[], Any], /, *_: Any, **__: Any) -> "Future[Any]":
        self._noted.append(_Noted(compile))
        return self._noted[-1].future

    def compile(self) -> None:
        """Compiles and loads all that is noted."""
        device = torch.cuda.current_device()  # a thread has a current device of its own
        size = min(MAX_THREADS, os.cpu_count() or 1)
        try:
            pool = ThreadPoolExecutor(size, "load", torch.cuda.set_device, (device,))
            with launchers_apart(), pool as threads:
                self._compile(threads)
        finally:
            for noted in self._noted:  # where Ctrl-C came: whoever waits for them goes on
                if not noted.future.done():
                    noted.future.set_exception(_NotCompiledError())

    def _compile(self, threads: ThreadPoolExecutor) -> None:
        with _only_from_cache():
            list(threads.map(_Noted.load, self._noted))
        missing = dict(enumerate(noted for noted in self._noted if not noted.future.done()))
        with closing(run_in_forks([noted.compile for noted in missing.values()])) as compiled:
            bar = tqdm(compiled, "kernels", len(missing), leave=False, disable=None)
            for index in bar:
                threads.submit(missing.pop(index).load)
        for noted in missing.values():  # those that failed say so
            threads.submit(noted.load)


@contextmanager
def launchers_apart() -> Iterator[None]:
    """Within, threads may load launchers side by side.

    Triton 3.6 makes each launcher a Python module, and calls them all the same. Who loads one for a
    second time gets the module that was last loaded under that name, with what is in the file put
    into it (CPython's way with modules that can't be initialised twice). Another thread may have
    loaded it, and not yet taken its launcher out. From 3.7 on there is one launcher for all.
    """
    load, one_at_a_time = getattr(build, "_load_module_from_path", None), Lock()
    if load is None:  # a later Triton's modules are its own affair
        yield
        return

    def load_apart(name: str, path: str) -> ModuleType | SimpleNamespace:
        with one_at_a_time:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load


@contextmanager
def _only_from_cache() -> Iterator[None]:
    """Within, what would have to be compiled is not.

    Raises, where that is asked for:
        _NotCompiledError
    """

    def refuse(*_: Any) -> NoReturn:
        raise _NotCompiledError

    make_ir = ASTSource.make_ir
    ASTSource.make_ir = refuse
    try:
        yield
    finally:
        ASTSource.make_ir = make_ir
