"""The ranks of a model, as their engine sees them: talk to them, watch them, end them.

Where they run is a subclass's to say: ``RankProcesses`` of this host, or ``RayRanks``.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import NoReturn, Protocol

import msgspec
import zmq

from mini_infer.core.errors import EngineDeadError
from mini_infer.parallel.rank_place import RankPlace
from mini_infer.runtime.rank_messages import Failed, FromRank, Stop, ToRank
from mini_infer.runtime.silence import PATIENT_SECONDS, SILENCE_SECONDS

POLL_MS = 50
LAG_SECONDS = 7.0
"""A rank that is not done with a step that others have launched so long ago hangs: all do the same
work."""
GRACE_SECONDS = 1.0
"""From one rank's word that another is gone, until the system says so."""
STOP_SECONDS = 2.0
STALE_SECONDS = 1.0
"""After so long without a look at the beats they say nothing of what was meanwhile."""


class Beats(Protocol):
    """Signs of life of all ranks."""

    def read(self) -> list[tuple[int, int]]:
        """Beats and steps of each rank so far."""
        ...

    def close(self) -> None:
        """Lets go of what they come through."""
        ...


class Ranks(ABC):
    """A socket for each rank's orders, one for all that they tell, and their beats.

    Not thread-safe.
    """

    grace_seconds = GRACE_SECONDS
    """How long it may take until a rank's end is known here."""

    def __init__(self, size: int, num_stages: int = 1) -> None:
        """Makes the sockets, which the subclass binds, before it starts ``size`` ranks, in
        ``num_stages`` of a pipeline, and calls ``_watch_anew``."""
        self.size = size
        self.layer_seconds: float | None = None
        """What a layer may take, where the counts of steps move with each of them: then a step is
        under way while they do."""
        self.places = [RankPlace(rank, size // num_stages, num_stages) for rank in range(size)]
        self._beats: Beats
        self._reason: str | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromRank).decode
        self._unsent: deque[bytes] = deque()
        self._num_told = 0
        """Ranks that have the first of these."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = context.socket(zmq.PULL)
        self._outboxes = [context.socket(zmq.PUSH) for _ in range(size)]
        for socket in (self._inbox, *self._outboxes):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # the engine must not wait
            socket.setsockopt(zmq.RCVHWM, 0)

    @abstractmethod
    def name(self, rank: int) -> str:
        """A rank in an error's text."""

    @abstractmethod
    def _killed(self) -> int | None:
        """A rank that has ended without having been able to say why."""

    @abstractmethod
    def _ended(self) -> int | None:
        """A rank that has ended, however."""

    @abstractmethod
    def _how_it_ended(self, rank: int) -> str:
        """What an error says of a rank that has ended."""

    @abstractmethod
    def _wait_for_ends(self, seconds: float) -> None:
        """Returns when all have ended, or after ``seconds``."""

    @abstractmethod
    def _end_all(self) -> None:
        """Ends all ranks, whatever they do, and removes what they used."""

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

    def look(self) -> FromRank | None:
        """While no step runs, about twice a second: a message that is there, without waiting.

        Raises:
            EngineDeadError: a rank has ended, or is stopped. Then all are ended.
        """
        self._check_alive()
        if not self._inbox.poll(0):
            self._look_for_lost(SILENCE_SECONDS)
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
        deadline = time.monotonic() + self.grace_seconds
        while time.monotonic() < deadline:
            self._look_for_killed()
            self._listen()
            time.sleep(POLL_MS / 1e3)
        self._look_for_silent(2 * GRACE_SECONDS)
        self._die(f"{self.name(message.rank)} has waited in vain: {message.failure.message}")

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
            self._wait_for_ends(STOP_SECONDS)
        self._clean_up()

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
        self._look_for_lost(PATIENT_SECONDS if loading else SILENCE_SECONDS)
        steps = [count for _, count in self._counts]
        behind = min(steps) < max(steps) or (self.layer_seconds is not None and not loading)
        waited = time.monotonic() - self._moved
        if behind and waited > LAG_SECONDS + (self.layer_seconds or 0):
            slow = steps.index(min(steps))  # of several, others wait for the first
            self._die(f"{self.name(slow)} hangs: others have waited {waited:.0f} s for its step")

    def _look_for_lost(self, limit: float) -> None:
        """Whether steps run or not; ``limit``: of silence, in seconds."""
        if time.monotonic() - self._listened > STALE_SECONDS:
            self._watch_anew()
        self._listen()
        self._look_for_killed()
        ended = self._ended()
        if ended is not None and not self._inbox.poll(int(GRACE_SECONDS * 1e3)):
            self._die_of(ended)  # else it has said why
        self._look_for_silent(limit)

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
        killed = self._killed()
        if killed is not None:
            self._die_of(killed)

    def _look_for_silent(self, limit: float) -> None:
        for rank, beaten in enumerate(self._beaten):
            if (silence := time.monotonic() - beaten) > limit:
                self._die(f"{self.name(rank)} has given no sign of life for {silence:.0f} s")

    def _die_of(self, rank: int) -> NoReturn:
        self._die(f"{self.name(rank)} {self._how_it_ended(rank)}")

    def _die(self, reason: str) -> NoReturn:
        self._reason = reason
        self._clean_up()
        raise EngineDeadError(self._text(reason))

    def _clean_up(self) -> None:
        self._end_all()
        for socket in (self._inbox, *self._outboxes):
            socket.close()
        self._beats.close()
