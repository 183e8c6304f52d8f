"""Work for files, done by forked processes side by side: each has all memory of this one."""

import ctypes
import gc
import os
import select
import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

MAX_PROCESSES = 16
PATIENCE = 30.0
"""Seconds in which one task at least must be done."""
ENDING = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1
"""Of ``prctl``: the signal that a process gets when its parent ends."""

Task = Callable[[], object]


def run_in_forks(tasks: Sequence[Task]) -> Generator[int, None, None]:
    """Runs tasks, the first ones first and 256 at most, for what they leave behind in files.

    A fork has none of this process's threads, so what one of them held stays locked in it: tasks
    ask for little, and nothing of a GPU. A fork that hangs all the same is killed. Where no more
    processes or files may be had, fewer forks work, or none.

    Yields:
        The index of each task that is done. One that failed never is.
    """
    ends: list[int] = []
    forks: list[int] = []
    try:
        with suppress(OSError), _held_back(ENDING):
            ends += os.pipe()
            ends += os.pipe()
            queue, put, _, report = ends
            os.write(put, bytes(range(len(tasks))[:256]))  # each read takes one
            for _ in range(min(MAX_PROCESSES, os.cpu_count() or 1, len(tasks))):
                # Not by a comprehension: if one can't be forked, those before it must be known.
                forks.append(_fork(tasks, queue, report))  # noqa: PERF401
        if not forks:
            return
        queue, put, done, report = ends
        ends = [done]
        for end in (queue, put, report):  # the last reads find none left, and no one to wait for
            os.close(end)
        poll = select.poll()  # as select() takes no descriptor beyond 1023
        poll.register(done, select.POLLIN)
        while poll.poll(1000 * PATIENCE) and (index := os.read(done, 1)):
            yield index[0]
    finally:
        with _held_back(ENDING):
            for end in ends:
                os.close(end)
            for fork in forks:
                # SIGCHLD may be ignored: then one that is over leaves its number to others.
                with suppress(ProcessLookupError, ChildProcessError):
                    if os.waitpid(fork, os.WNOHANG) == (0, 0):
                        os.kill(fork, signal.SIGKILL)
                        os.waitpid(fork, 0)


@contextmanager
def _held_back(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Within, this thread gets none of these."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(tasks: Sequence[Task], queue: int, report: int) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():  # Python's, that there are threads
        warnings.simplefilter("ignore", DeprecationWarning)
        fork = os.fork()
    if fork:
        return fork
    try:
        _work(tasks, queue, report, parent)
    finally:
        os._exit(0)


def _work(tasks: Sequence[Task], queue: int, report: int, parent: int) -> None:
    """A fork's life. Signals that end it are held back when it begins: the parent's handlers would
    raise, and what the parent does then is not this process's to do."""
    gc.disable()  # no tensor of the parent's is this process's to free
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it may be killed, and a task hang
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    # Who waits for the parent's end of a pipe or socket must not wait for this process, too. Not
    # by closerange(): up to a limit of 2**30, some Pythons close one by one.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (queue, report):
            with suppress(OSError):  # that of the list itself
                os.close(int(name))
    while os.getppid() == parent and (index := os.read(queue, 1)):
        with suppress(Exception):
            tasks[index[0]]()
            os.write(report, index)
