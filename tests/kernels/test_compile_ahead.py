"""Kernels are compiled by forks and not run: for a GPU that a fake driver claims to be there."""

from collections.abc import Generator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime import build  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from mini_infer.kernels.triton import compile_ahead as compile_ahead_module  # noqa: E402
from mini_infer.kernels.triton.compile_ahead import (  # noqa: E402
    compile_ahead,
    launchers_apart,
)
from mini_infer.kernels.triton.forks import Task  # noqa: E402
from mini_infer.kernels.triton.forks import run_in_forks as run_in_real_forks  # noqa: E402
from tests.kernels.fake_gpu import FakeDriver, fake_gpu  # noqa: E402


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return fake_gpu(tmp_path, monkeypatch)


def store(out, value: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(value > 0)
    tl.store(out + tl.arange(0, 16), value)


def test_what_is_launched_within_is_compiled_once_and_runs_only_afterwards(
    fake: FakeDriver,
) -> None:
    kernel = JITFunction(store)
    out = torch.zeros(16, dtype=torch.int32)
    with compile_ahead():
        for value in (1, 2, 1):
            kernel[(1,)](out, value)
    assert len(fake.loaded) == 2
    assert all(name.startswith("load") for name in fake.loaded)
    assert fake.launched == 0
    for value in (1, 2):
        kernel[(1,)](out, value)
    assert (len(fake.loaded), fake.launched) == (2, 2)


def test_this_process_compiles_what_no_fork_did(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead_module, "run_in_forks", lambda tasks: (0 for _ in ""))
    kernel = JITFunction(store)
    with compile_ahead():
        kernel[(1,)](torch.zeros(16, dtype=torch.int32), 1)
    assert len(fake.loaded) == 1


def test_what_is_in_the_cache_takes_no_fork(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, forked = torch.zeros(16, dtype=torch.int32), []

    def run_in_forks(tasks: Sequence[Task]) -> Generator[int, None, None]:
        forked.append(len(tasks))
        return run_in_real_forks(tasks)

    monkeypatch.setattr(compile_ahead_module, "run_in_forks", run_in_forks)
    for values in ((1, 2), (1, 2, 3), (1, 2, 3)):
        kernel = JITFunction(store)  # a new process's knows nothing of the last one's
        with compile_ahead():
            for value in values:
                kernel[(1,)](out, value)
    assert forked == [2, 1, 0]
    assert len(fake.loaded) == 2 + 3 + 3


def test_ctrl_c_ends_the_compilation(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(tasks: Sequence[Task]) -> Generator[int, None, None]:
        raise KeyboardInterrupt
        yield 0

    monkeypatch.setattr(compile_ahead_module, "run_in_forks", interrupted)
    kernel = JITFunction(store)
    with pytest.raises(KeyboardInterrupt), compile_ahead():
        kernel[(1,)](torch.zeros(16, dtype=torch.int32), 1)


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(fake: FakeDriver) -> None:
    kernel = JITFunction(store)
    out = torch.zeros(16, dtype=torch.int32)
    with compile_ahead():
        kernel[(1,)](out, -1)
    with pytest.raises(triton.CompilationError):
        kernel[(1,)](out, -1)


def test_new_memory_is_zero_within_and_only_there(fake: FakeDriver) -> None:
    poison = torch.full((1 << 16,), torch.nan)
    del poison  # whose memory the next tensor may get
    with compile_ahead():
        tensors = [
            torch.empty(1 << 16),
            torch.empty_like(torch.ones(3)),
            torch.ones(3).new_empty(2, 2),
        ]
    assert not any(tensor.any() for tensor in tensors)


def test_launches_are_themselves_again_after_an_error(fake: FakeDriver) -> None:
    kernel = JITFunction(store)
    with pytest.raises(ZeroDivisionError), compile_ahead():
        raise ZeroDivisionError
    kernel[(1,)](torch.zeros(16, dtype=torch.int32), 1)
    assert fake.launched == 1


def test_a_launcher_stays_what_it_was_when_another_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As CPython does with two files of one name that it has loaded before."""
    shared = ModuleType("launcher")

    def load(name: str, path: str) -> ModuleType:
        vars(shared)["launch"] = path
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    with launchers_apart():
        first, second = (build._load_module_from_path("launcher", path) for path in "ab")
    assert (first.launch, second.launch) == ("a", "b")
    assert build._load_module_from_path is load
