"""Ranks that are processes of this host."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from mini_infer.runtime.engine_process import MAX_FOLDER_BYTES, THREADS
from mini_infer.runtime.rank_beats import RankBeats
from mini_infer.runtime.rank_worker import INBOX, OUTBOX
from mini_infer.runtime.ranks import STOP_SECONDS, Ranks
from mini_infer.runtime.silence import shared_memory

PROGRAM = (
    # First of all: the working directory, which "-c" puts there, may hide modules.
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from mini_infer.runtime.rank_worker import main; main()"
)
OWN_ENDS = (0, 1)
"""Exit codes of ranks that have said why."""


class RankProcesses(Ranks):
    """``size`` new interpreters and no forks: neither threads nor a device's state could be taken
    over. Each has a session of its own, so that a terminal's Ctrl-C reaches the engine only, and a
    pipe as its standard input, which ends with this process.
    """

    def __init__(self, size: int, num_threads: int, num_stages: int = 1) -> None:
        """Starts the processes; each may use ``num_threads`` of a CPU's."""
        super().__init__(size, num_stages)
        # For this user only. The path of a socket has some 100 bytes.
        is_long = len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES
        self._folder = Path(tempfile.mkdtemp(prefix="mini-infer-", dir="/tmp" if is_long else None))
        self._processes: list[subprocess.Popen[bytes]] = []
        memory = shared_memory(RankBeats.num_bytes(size))
        self._beats = RankBeats(memory, size)
        names = [OUTBOX, *map(INBOX.format, range(size))]
        try:
            for socket, name in zip([self._inbox, *self._outboxes], names, strict=True):
                socket.bind(f"ipc://{self._folder}/{name}")
            for rank in range(size):
                self._processes.append(self._spawn(rank, num_threads, memory))
        except (zmq.ZMQError, OSError) as error:
            self._die(f"their processes can't be started: {error}")
        finally:
            os.close(memory)
        self._watch_anew()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def folder(self) -> Path:
        """Where their sockets are; removed at the end."""
        return self._folder

    def _spawn(self, rank: int, num_threads: int, memory: int) -> "subprocess.Popen[bytes]":
        own = {"OMP_NUM_THREADS": str(num_threads)}
        if rank:
            own["TQDM_DISABLE"] = "1"  # one of them shows its progress
        numbers = map(str, (rank, self.size, memory))
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self._folder), *numbers, "\n".join(sys.path)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=(memory,),
            env={**THREADS, **os.environ, **own},
            start_new_session=True,
        )

    def name(self, rank: int) -> str:
        return str(self.places[rank])

    def _killed(self) -> int | None:
        return self._first_with(lambda code: code not in (None, *OWN_ENDS))

    def _ended(self) -> int | None:
        return self._first_with(lambda code: code is not None)

    def _first_with(self, condition: Callable[[int | None], bool]) -> int | None:
        ranks = range(len(self._processes))
        return next((rank for rank in ranks if condition(self._processes[rank].poll())), None)

    def _how_it_ended(self, rank: int) -> str:
        return _how_it_ended(self._processes[rank].returncode)

    def _wait_for_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _end_all(self) -> None:
        # Before and after: where this process is killed meanwhile, nobody is left to do it.
        shutil.rmtree(self._folder, ignore_errors=True)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver's call may hold it
                process.wait(STOP_SECONDS)
            assert process.stdin is not None
            process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}; its output above may say why"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (where nobody did it: often too little memory)"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
