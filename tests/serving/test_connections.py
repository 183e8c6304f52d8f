"""Connections without a whole head are cut: after a while, or when there are too many."""

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mini_infer.serving.connections import (
    MAX_PIPELINED,
    GuardedProtocol,
    HalfOpen,
    half_open_limit,
    raise_descriptor_limit,
)
from mini_infer.serving.listener import bind
from tests.serving.live import PATIENCE, wait_for

Address = tuple[str, int]


async def large(request: Request) -> Response:
    return Response(b"x" * 2**24)


async def hello(request: Request) -> Response:
    return PlainTextResponse((await request.body()).decode() or "hello")


@contextlib.contextmanager
def listening(half_open: HalfOpen) -> Iterator[Address]:
    app = Starlette(routes=[Route("/", hello, methods=["GET", "POST"]), Route("/large", large)])
    config = uvicorn.Config(app, http=half_open.protocol(), log_level="critical", lifespan="off")
    server, listener = uvicorn.Server(config), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(half_open) == 0


def is_cut(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    with (
        listening(HalfOpen(100, timeout=0.02)) as address,
        socket.create_connection(address) as connection,
    ):
        connection.sendall(sent)
        assert is_cut(connection)


def test_a_head_without_end_is_refused() -> None:
    """uvicorn kept it in memory, before any key was looked at."""
    with listening(HalfOpen(100)) as address, socket.create_connection(address) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(OSError):  # cut while it sent
            send_all(connection, [b"X-Many: " + b"a" * 2**14 + b"\r\n"] * 200 + [b"\r\n"])
        with contextlib.suppress(ConnectionResetError):
            assert b" 200 " not in connection.recv(4096)


def send_all(connection: socket.socket, pieces: list[bytes]) -> None:
    for piece in pieces:
        connection.sendall(piece)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\n", b"X-A: " + b"a" * 2**14 + b"\r\n"),
        (b"0\r\nX: ", b"a" * 2**14),
        (b"1;", b"a" * 2**14),
    ],
    ids=["trailers", "one trailer", "extension of a chunk"],
)
def test_trailers_without_end_are_cut(begin: bytes, piece: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
    with listening(HalfOpen(100)) as address, socket.create_connection(address) as connection:
        connection.sendall(head + begin)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_all(connection, [piece] * 2000)


def test_pipelined_requests_without_end_are_cut() -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with listening(HalfOpen(100)) as address:
        with socket.create_connection(address) as connection:
            connection.settimeout(PATIENCE)
            connection.sendall(request * MAX_PIPELINED)
            answers = b""
            while answers.count(b"200 OK") < MAX_PIPELINED:
                answers += connection.recv(2**16)
        with socket.create_connection(address) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            connection.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                send_all(connection, [request * 1000] * 10)
                while connection.recv(2**16):  # whatever was answered before
                    pass


def test_a_long_head_and_a_longer_body_pass() -> None:
    body = b"b" * 2**19
    with listening(HalfOpen(100)) as address:
        url = f"http://{address[0]}:{address[1]}/"
        with httpx.Client() as client:
            for _ in range(3):
                answer = client.post(url, content=body, headers={"x-long": "a" * 40_000})
                assert answer.content == body


def test_a_request_takes_as_long_as_it_takes() -> None:
    half_open = HalfOpen(100)
    with (
        listening(half_open) as address,
        socket.create_connection(address) as connection,
    ):
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        wait_for(lambda: len(half_open) == 0)
        connection.sendall(b"hi")
        connection.settimeout(PATIENCE)
        answer = connection.recv(4096)
        assert answer.endswith(b"hi")
        # The second request of a connection has no more time for its head.
        half_open.timeout = 0.02
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert is_cut(connection)


def test_an_answer_that_is_not_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[GuardedProtocol] = []
    connection_lost = GuardedProtocol.connection_lost

    def note(self: GuardedProtocol, exc: Exception | None) -> None:
        lost.append(self)
        connection_lost(self, exc)

    monkeypatch.setattr(GuardedProtocol, "write_timeout", 0.05)
    monkeypatch.setattr(GuardedProtocol, "connection_lost", note)
    with listening(HalfOpen(100)) as address, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(lambda: len(lost) == 1)


def test_whoever_reads_may_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it is looked at, something was read."""
    connection = GuardedProtocol.__new__(GuardedProtocol)
    waiting = iter((900, 800, 100, 100))
    timers: list[int] = []
    connection.transport = Mock(get_write_buffer_size=lambda: next(waiting))
    monkeypatch.setattr(connection, "_watch", timers.append)
    for num_unread in (1000, 900, 800):
        connection._cut_unless_read(num_unread)
        assert not connection.transport.abort.called
    assert timers == [900, 800, 100]
    connection._cut_unless_read(100)
    assert connection.transport.abort.called


def test_the_longest_waiting_gives_its_place_to_whoever_comes() -> None:
    half_open = HalfOpen(3, timeout=60)
    with listening(half_open) as address, contextlib.ExitStack() as stack:
        waiting = []
        for index in range(6):
            waiting.append(stack.enter_context(socket.create_connection(address)))
            waiting[-1].sendall(b"GET / HTTP/1.1\r\n")
            wait_for(lambda seen=index + 1: len(half_open) == min(seen, 3))  # type: ignore[misc]
            assert httpx.get(f"http://127.0.0.1:{address[1]}/").text == "hello"
        assert all(is_cut(connection) for connection in waiting[:3])
        waiting[-1].sendall(b"Host: x\r\n\r\n")
        waiting[-1].settimeout(PATIENCE)
        assert waiting[-1].recv(4096).startswith(b"HTTP/1.1 200")


def test_the_limit_is_half_of_what_the_process_may_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        allowed = raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(allowed, soft)
        assert allowed >= min(soft, 2**16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert half_open_limit(1024) == 480
    assert half_open_limit(10) == 1
