"""Work in forked processes: what they leave behind, and what is left where one fails."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from mini_infer.kernels.triton import forks
from mini_infer.kernels.triton.forks import MAX_PROCESSES, Task, run_in_forks


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
    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (write,) = writing(tmp_path, range(1))
    assert list(run_in_forks([signal.pause, write])) == [1]
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


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
