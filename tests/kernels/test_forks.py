"""Work in forked processes: what they leave behind, and what is left where one fails."""

import errno
import gc
import os
import resource
import select
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from mini_infer.kernels.triton import forks
from mini_infer.kernels.triton.forks import MAX_PROCESSES, Task, run_in_forks

SELECTABLE = 1024
"""Descriptors that ``select`` can wait for."""


def writing(folder: Path, names: range) -> list[Task]:
    def task(name: int) -> Callable[[], object]:
        return lambda: (folder / str(name)).write_text(str(os.getpid()))

    return [task(name) for name in names]


def test_each_task_is_done_once_in_another_process(tmp_path: Path) -> None:
    count = 2 * MAX_PROCESSES + 1
    assert sorted(run_in_forks(writing(tmp_path, range(count)))) == list(range(count))
    pids = {int((tmp_path / str(name)).read_text()) for name in range(count)}
    assert os.getpid() not in pids
    assert len(pids) <= MAX_PROCESSES


def test_nothing_to_do_takes_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    assert not list(run_in_forks([]))


def test_no_more_is_done_than_a_queue_holds(tmp_path: Path) -> None:
    assert sorted(run_in_forks(writing(tmp_path, range(300)))) == list(range(256))


def fail() -> None:
    raise ValueError


def test_what_failed_is_not_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, last = writing(tmp_path, range(2))
    assert sorted(run_in_forks([first, fail, last])) == [0, 2]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_fork_that_dies_takes_none_of_the_others_work(
    tmp_path: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    first, last = writing(tmp_path, range(2))
    tasks = [lambda: os.kill(os.getpid(), number), first, last]
    assert sorted(run_in_forks(tasks)) == [1, 2]
    assert capfd.readouterr() == ("", "")


def test_a_fork_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    fork, pids = os.fork, []

    def noted_fork() -> int:
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", noted_fork)
    (write,) = writing(tmp_path, range(1))
    done = run_in_forks([signal.pause, write])
    assert next(done) == 1
    monkeypatch.setattr(forks, "PATIENCE", 0.0)
    assert not list(done)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_fork_holds_no_descriptor_of_this_process(tmp_path: Path) -> None:
    """Else whoever waits for their end would wait for it."""
    ends = os.pipe()

    def stays_open() -> None:
        for end in ends:
            os.fstat(end)

    try:
        assert not list(run_in_forks([stays_open]))
    finally:
        for end in ends:
            os.close(end)


def test_what_cannot_be_forked_is_left_to_those_that_could(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    fork, allowed = os.fork, iter([True, False])

    def fork_once() -> int:
        if next(allowed):
            return fork()
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", fork_once)
    tasks = writing(tmp_path, range(3))
    assert sorted(run_in_forks(tasks)) == [0, 1, 2]


def test_where_nothing_can_be_forked_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    assert list(run_in_forks(writing(tmp_path, range(3)))) == []
    assert not any(tmp_path.iterdir())


def test_descriptors_beyond_what_select_knows(tmp_path: Path) -> None:
    many = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if many <= SELECTABLE + 8:
        pytest.skip("so many may not be open here")
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < SELECTABLE:
            held.append(os.dup(held[0]))
        assert list(run_in_forks(writing(tmp_path, range(1)))) == [0]
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_signals_are_blocked_no_longer_than_a_fork_takes(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert list(run_in_forks(writing(tmp_path, range(1)))) == [0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_fork_leaves_with_nothing_of_what_its_parent_would_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where it could not set itself up."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    assert list(run_in_forks(writing(tmp_path, range(2)))) == []
    assert not any(tmp_path.iterdir())


def test_a_fork_whose_parent_was_killed_goes_too_also_where_its_task_hangs(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def hang() -> None:
        with fifo.open("wb", buffering=0) as file:
            file.write(b"!")
            signal.pause()

    with warnings.catch_warnings():  # Python's, that there are threads
        warnings.simplefilter("ignore", DeprecationWarning)
        parent = os.fork()
    if not parent:
        list(run_in_forks([hang]))
        os._exit(0)
    with fifo.open("rb", buffering=0) as file:
        assert file.read(1) == b"!"
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        poll = select.poll()
        poll.register(file, select.POLLIN)
        assert poll.poll(10_000)
        assert file.read(1) == b""


def test_without_descriptors_nothing_is_done_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends, made = os.pipe(), iter([True, False])

    def one_pipe() -> tuple[int, int]:
        if next(made):
            return ends
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "pipe", one_pipe)
    assert not list(run_in_forks(writing(tmp_path, range(2))))
    for end in ends:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(end)


def test_descriptors_are_closed_by_name_not_up_to_a_limit_that_may_be_a_billion(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "closerange")
    assert list(run_in_forks(writing(tmp_path, range(1)))) == [0]
