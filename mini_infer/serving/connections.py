"""Connections that have not sent a whole request head: how long, and how many of them.

uvicorn waits for the head of a connection's first request without end, and for the rest of one of
which a byte came. Such connections cost no more than a file descriptor each, but a process has only
so many, and at the last one nobody is served any more.

Nor does uvicorn end its wait for a client that reads nothing of its answer, or bound
the length of a head, which it keeps before anybody looks at its key.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol

HEAD_TIMEOUT = 30.0
"""Seconds that a client has for a request's head, from its connection or from its first byte."""
MAX_HEAD_BYTES = 2**16
"""Within which a head must end, and the trailers of a body. What one read brought is let pass."""
MAX_PIPELINED = 16
"""Requests that a client may send ahead of the answer to an earlier one. uvicorn keeps them all."""
TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain\r\ncontent-length: 27\r\nconnection: close\r\n\r\n"
    b"the headers are too long.\r\n"
)
WRITE_TIMEOUT = 120.0
"""Seconds within which a client that lets an answer wait must read some of it, as with nginx's
``send_timeout``. What it reads first is what the system's buffers hold, some megabytes."""
MAX_DESCRIPTORS = 2**16
SPARE_DESCRIPTORS = 64
"""Of files, the engine's link and libraries."""


class HalfOpen:
    """The connections that wait for a head, longest waiting first. Above ``limit`` the first of
    them is cut for each that comes, so that whoever sends a request gets in."""

    def __init__(self, limit: int, timeout: float = HEAD_TIMEOUT) -> None:
        self.limit = limit
        self.timeout = timeout
        self._waiting: dict[GuardedProtocol, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, connection: "GuardedProtocol") -> None:
        if connection in self._waiting:
            return
        loop = asyncio.get_running_loop()
        self._waiting[connection] = loop.call_later(self.timeout, self._cut, connection)
        if len(self._waiting) > self.limit:
            self._cut(next(iter(self._waiting)))

    def leave(self, connection: "GuardedProtocol") -> None:
        timer = self._waiting.pop(connection, None)
        if timer:
            timer.cancel()

    def _cut(self, connection: "GuardedProtocol") -> None:
        self.leave(connection)
        connection.transport.abort()

    def protocol(self) -> type[Protocol]:
        """The class of connections that this guards, for ``uvicorn.Config``."""
        return type("GuardedConnection", (GuardedProtocol,), {"half_open": self})


class GuardedProtocol(Protocol):
    """uvicorn's protocol, which tells ``half_open`` whether a head is awaited. Between two requests
    of a connection that is uvicorn's own affair, until a byte comes."""

    half_open: HalfOpen
    write_timeout = WRITE_TIMEOUT
    _num_head_bytes = 0
    """Since a request began, or since a piece of its body: of its head, or of trailers."""
    _unread: asyncio.TimerHandle | None = None
    """Runs while more waits for the client than the transport wants to hold."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.half_open.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.half_open.leave(self)
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch(self, num_unread: int) -> None:
        loop = asyncio.get_running_loop()
        self._unread = loop.call_later(self.write_timeout, self._cut_unless_read, num_unread)

    def _cut_unless_read(self, num_unread: int) -> None:
        """Nothing is added while writing is paused: what was read shows in what is left."""
        left = self.transport.get_write_buffer_size()
        if left < num_unread:
            self._watch(left)
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread:
            self._unread.cancel()
            self._unread = None

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        cycle: Any = self.cycle
        if self.transport.is_closing():
            return
        if cycle is None or cycle.response_complete:
            self.half_open.enter(self)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.write(TOO_LONG)
                self.transport.close()
        else:
            self.half_open.leave(self)
            if self._num_head_bytes > MAX_HEAD_BYTES or len(self.pipeline) > MAX_PIPELINED:
                self.transport.abort()


def raise_descriptor_limit() -> int:
    """Lets this process open as many files and connections as it may; returns how many."""
    try:
        import resource
    except ImportError:  # not a Unix
        return MAX_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # macOS may refuse what it says it allows
            return soft
        return wanted
    return min(soft, MAX_DESCRIPTORS) if soft > 0 else MAX_DESCRIPTORS


def half_open_limit(num_descriptors: int) -> int:
    """Half of what connections may have: the other half is for those that are served."""
    return max((num_descriptors - SPARE_DESCRIPTORS) // 2, 1)
