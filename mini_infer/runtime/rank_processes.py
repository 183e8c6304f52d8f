"""The processes of a model's ranks, as their engine sees them: start, talk, watch, end."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from mini_infer.core.errors import EngineDeadError
from mini_infer.runtime.engine_process import MAX_FOLDER_BYTES, THREADS
from mini_infer.runtime.rank_beats import RankBeats
from mini_infer.runtime.rank_messages import Failed, FromRank, Stop, ToRank
from mini_infer.runtime.rank_worker import BEATS, INBOX, OUTBOX

PROGRAM = (
    # First of all: the working directory, which "-c" puts there, may hide modules.
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from mini_infer.runtime.rank_worker import main; main()"
)
POLL_MS = 50
SILENCE_SECONDS = 5.0
"""After so long without a beat a rank is taken for stopped. A thread of its own beats, whatever the
others do, and needs the interpreter for microseconds."""
LOADING_SILENCE_SECONDS = 60.0
"""The same while libraries and weights are read, which may keep the interpreter for seconds."""
LAG_SECONDS = 7.0
"""A rank that is not done with a step that others have launched so long ago hangs: all do the same
work."""
GRACE_SECONDS = 1.0
"""From one rank's word that another is gone, until the system says so."""
STOP_SECONDS = 2.0
STALE_SECONDS = 1.0
"""After so long without a look at the beats they say nothing of what was meanwhile."""
OWN_ENDS = (0, 1)
"""Exit codes of ranks that have said why."""


class RankProcesses:
    """``size`` new interpreters and no forks: neither threads nor a device's state could be taken
    over. Each has a session of its own, so that a terminal's Ctrl-C reaches the engine only, and a
    pipe as its standard input, which ends with this process.

    Not thread-safe.
    """

    def __init__(self, size: int, num_threads: int) -> None:
        """Starts the processes; each may use ``num_threads`` of a CPU's."""
        self.size = size
        # For this user only. The path of a socket has some 100 bytes.
        is_long = len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES
        self._folder = Path(tempfile.mkdtemp(prefix="mini-infer-", dir="/tmp" if is_long else None))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reason: str | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromRank).decode
        self._unsent: deque[bytes] = deque()
        self._num_told = 0
        """Ranks that have the first of these."""
        self._beats = RankBeats(self._folder / BEATS, size)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = context.socket(zmq.PULL)
        self._outboxes = [context.socket(zmq.PUSH) for _ in range(size)]
        names = [OUTBOX, *map(INBOX.format, range(size))]
        try:
            for socket, name in zip([self._inbox, *self._outboxes], names, strict=True):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, 0)  # the engine must not wait
                socket.setsockopt(zmq.RCVHWM, 0)
                socket.bind(f"ipc://{self._folder}/{name}")
            for rank in range(size):
                self._processes.append(self._spawn(rank, num_threads))
        except (zmq.ZMQError, OSError) as error:
            self._die(f"their processes can't be started: {error}")
        self._watch_anew()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def folder(self) -> Path:
        """Where their sockets are; removed at the end."""
        return self._folder

    def send(self, message: ToRank) -> None:
        """To all ranks, without waiting for any.

        Raises:
            EngineDeadError: they have ended.
        """
        self._check_alive()
        self._unsent.append(self._encode(message))
        try:
            self._flush()
        finally:  # also where Ctrl-C falls between two ranks, for one would wait for the other
            if self._reason is None:
                self._flush()

    def _flush(self) -> None:
        """One rank may be told twice, where it was interrupted, and ignores that."""
        while self._unsent:
            while self._num_told < self.size:
                self._push(self._outboxes[self._num_told], self._unsent[0])
                self._num_told += 1
            self._num_told = 0
            self._unsent.popleft()

    def receive(self, *, loading: bool = False, seconds: float | None = None) -> FromRank | None:
        """The next message of any rank; None after ``seconds`` without one.

        Raises:
            EngineDeadError: a rank has ended, or hangs. Then all are ended.
        """
        self._check_alive()
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._inbox.poll(POLL_MS):
            self._watch(loading)
            if deadline is not None and time.monotonic() > deadline:
                return None
        message: FromRank = self._decode(self._inbox.recv())
        return message

    def fail(self, reason: str) -> NoReturn:
        """Ends all ranks, as no further step can work.

        Raises:
            EngineDeadError: always.
        """
        self._die(reason)

    def blame(self, message: Failed) -> NoReturn:
        """Ends all ranks, and finds the one that another one misses.

        Raises:
            EngineDeadError: always.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            self._look_for_killed()
            self._listen()
            time.sleep(POLL_MS / 1e3)
        self._look_for_silent(2 * GRACE_SECONDS)
        self._die(f"rank {message.rank} has waited in vain: {message.failure.message}")

    def close(self) -> None:
        """Ends the processes, whatever they do; removes what they used; harmless when called
        twice."""
        if self._inbox.closed:
            return
        if self._reason is None:
            self._reason = "they were shut down"
            with contextlib.suppress(zmq.ZMQError):
                data = self._encode(Stop())
                for outbox in self._outboxes:
                    outbox.send(data, zmq.DONTWAIT)
            deadline = time.monotonic() + STOP_SECONDS
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self._clean_up()

    def _spawn(self, rank: int, num_threads: int) -> "subprocess.Popen[bytes]":
        own = {"OMP_NUM_THREADS": str(num_threads)}
        if rank:
            own["TQDM_DISABLE"] = "1"  # one of them shows its progress
        arguments = [str(self._folder), str(rank), str(self.size), "\n".join(sys.path)]
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            bufsize=0,
            env={**THREADS, **os.environ, **own},
            start_new_session=True,
        )

    def _push(self, outbox: "zmq.Socket[bytes]", data: bytes) -> None:
        """A socket takes anything while there is another end; that of a rank which is gone would
        wait for the next one."""
        while True:
            try:
                return outbox.send(data, zmq.DONTWAIT)
            except zmq.Again:
                self._watch(loading=True)
                outbox.poll(POLL_MS, zmq.POLLOUT)

    def _check_alive(self) -> None:
        if self._reason is not None:
            raise EngineDeadError(self._text(self._reason))

    def _text(self, reason: str) -> str:
        return f"the model's {self.size} ranks have ended: {reason}"

    def _watch_anew(self) -> None:
        """What was before was not watched: nobody waited, or all were suspended."""
        self._listened = now = time.monotonic()
        self._counts = self._beats.read()
        self._beaten = [now] * self.size
        self._moved = now

    def _watch(self, loading: bool) -> None:
        if time.monotonic() - self._listened > STALE_SECONDS:
            self._watch_anew()
        self._listen()
        self._look_for_killed()
        ended = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
        if ended and not self._inbox.poll(int(GRACE_SECONDS * 1e3)):  # else it has said why
            self._die_of(ended[0])
        self._look_for_silent(LOADING_SILENCE_SECONDS if loading else SILENCE_SECONDS)
        steps = [count for _, count in self._counts]
        if min(steps) < max(steps) and time.monotonic() - self._moved > LAG_SECONDS:
            slow = steps.index(min(steps))
            self._die(f"rank {slow} hangs in a step that others launched {LAG_SECONDS:g} s ago")

    def _listen(self) -> None:
        """Notes which counters have moved."""
        self._listened = now = time.monotonic()
        counts = self._beats.read()
        for rank, (before, after) in enumerate(zip(self._counts, counts, strict=True)):
            if before[0] != after[0]:
                self._beaten[rank] = now
            if before[1] != after[1]:
                self._moved = now
        self._counts = counts

    def _look_for_killed(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() not in (None, *OWN_ENDS):
                self._die_of(rank)

    def _look_for_silent(self, limit: float) -> None:
        for rank, beaten in enumerate(self._beaten):
            if (silence := time.monotonic() - beaten) > limit:
                self._die(f"rank {rank} has given no sign of life for {silence:.0f} s")

    def _die_of(self, rank: int) -> NoReturn:
        self._die(f"rank {rank} {_how_it_ended(self._processes[rank].returncode)}")

    def _die(self, reason: str) -> NoReturn:
        self._reason = reason
        self._clean_up()
        raise EngineDeadError(self._text(reason))

    def _clean_up(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver's call may hold it
                process.wait(STOP_SECONDS)
            assert process.stdin is not None
            process.stdin.close()
        for socket in (self._inbox, *self._outboxes):
            socket.close()
        self._beats.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}; its output above may say why"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (where nobody did it: often too little memory)"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
