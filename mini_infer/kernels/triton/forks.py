"""Work for files, done by forked processes side by side: each has all memory of this one."""

import gc
import os
import select
import signal
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from itertools import pairwise

MAX_PROCESSES = 16
PATIENCE = 30.0
"""Seconds in which one task at least must be done."""

Task = Callable[[], object]


def run_in_forks(tasks: Sequence[Task]) -> Generator[int, None, None]:
    """Runs tasks, the first ones first and 256 at most, for what they leave behind in files.

    A fork has none of this process's threads, so what one of them held stays locked in it: tasks
    ask for little, and nothing of a GPU. A fork that hangs all the same is killed.

    Yields:
        The index of each task that is done. One that failed never is.
    """
    queue, put = os.pipe()
    os.write(
        put, bytes(range(len(tasks))[:256])
    )  # each read takes one, and none is left in the end
    os.close(put)
    done, report = os.pipe()
    forks: list[int] = []
    try:
        try:
            for _ in range(min(MAX_PROCESSES, os.cpu_count() or 1, len(tasks))):
                # Not by a comprehension: if one can't be forked, those before it must be known.
                forks.append(_fork(tasks, queue, report))  # noqa: PERF401
        finally:
            os.close(report)
            os.close(queue)
        while select.select([done], [], [], PATIENCE)[0] and (index := os.read(done, 1)):
            yield index[0]
    finally:
        os.close(done)
        for fork in forks:
            with suppress(ProcessLookupError, ChildProcessError):  # a host may have SIGCHLD ignored
                os.kill(fork, signal.SIGKILL)
                os.waitpid(fork, 0)


def _fork(tasks: Sequence[Task], queue: int, report: int) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():  # Python's, that there are threads
        warnings.simplefilter("ignore", DeprecationWarning)
        if fork := os.fork():
            return fork
    try:
        gc.disable()  # no tensor of the parent's is this process's to free
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # Who waits for the parent's end of a pipe or socket must not wait for this process, too.
        for before, after in pairwise((2, *sorted((queue, report)), os.sysconf("SC_OPEN_MAX"))):
            os.closerange(before + 1, after)
        while os.getppid() == parent and (index := os.read(queue, 1)):
            with suppress(Exception):
                tasks[index[0]]()
                os.write(report, index)
    finally:
        os._exit(0)
