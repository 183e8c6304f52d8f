"""Signs of life of ranks on other hosts: what ``RankBeats`` is on one, over sockets.

A socket keeps the last message of each rank only, so nobody has to read them.
"""

import struct
import threading
import time

import zmq

_BEAT = struct.Struct("=3q")  # rank, beats, steps


class BeatSender:
    """A rank's own. Implements ``StepCounter``."""

    def __init__(self, address: str, rank: int, seconds: float) -> None:
        """Beats every so many ``seconds``, in a thread, until the process ends."""
        self._address, self._rank, self._seconds = address, rank, seconds
        self._num_steps = 0
        threading.Thread(target=self._run, daemon=True).start()

    def finish_step(self, rank: int) -> None:
        self._num_steps += 1

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.CONFLATE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address)
        num_beats = 0
        while True:
            num_beats += 1
            socket.send(_BEAT.pack(self._rank, num_beats, self._num_steps))
            time.sleep(self._seconds)


class BeatReceiver:
    """The engine's end, for all ranks. Implements ``Beats``."""

    def __init__(self, size: int) -> None:
        self._counts = [(0, 0)] * size
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)

    def bind(self, host: str) -> None:
        """Listens there, on a port that the system chooses; raises ZMQError."""
        self._socket.bind(f"tcp://{host}:*")

    @property
    def address(self) -> str:
        """Where ranks send theirs."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def read(self) -> list[tuple[int, int]]:
        while self._socket.poll(0):
            rank, num_beats, num_steps = _BEAT.unpack(self._socket.recv())
            self._counts[rank] = (num_beats, num_steps)
        return list(self._counts)

    def close(self) -> None:
        self._socket.close()
