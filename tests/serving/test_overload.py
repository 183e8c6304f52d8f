"""More than the server can do, and clients that do less than they should."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mini_infer.core.events import Event, Finished
from mini_infer.serving.options import ServerOptions
from tests.serving.live import (
    CHAT,
    COMPLETIONS,
    PATIENCE,
    LiveServer,
    live_server,
    wait_for,
)

ENDLESS: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """One request runs, two may wait."""
    options = ServerOptions(max_num_queued=2)
    with live_server(options, max_num_seqs=1, max_model_len=4096) as server:
        yield server


@pytest.fixture
def release(small: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine's steps do nothing until it is set."""
    step, release = small.engine.step, threading.Event()
    monkeypatch.setattr(small.engine, "step", lambda: step() if release.wait(0.002) else [])
    yield release
    release.set()
    small.wait_until_idle()


@contextlib.contextmanager
def waiting_requests(server: LiveServer, *choices: int) -> Iterator[None]:
    """Requests of so many choices each, all of them in the engine's queue."""
    clients = [httpx.Client(base_url=server.url) for _ in choices]
    room = server.async_engine._waiting_room

    def ask(client: httpx.Client, n: int) -> None:
        client.post(CHAT, json={"messages": HELLO, "n": n, "max_tokens": 1}, timeout=PATIENCE)

    with ThreadPoolExecutor() as pool:
        before = room.num_waiting
        answers = [pool.submit(ask, *pair) for pair in zip(clients, choices, strict=True)]
        wait_for(lambda: room.num_waiting == before + sum(choices))
        yield
    for client, answer in zip(clients, answers, strict=True):
        answer.result()
        client.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_who_comes_when_the_queue_is_full_is_told_to_come_again(
    small: LiveServer, release: threading.Event, path: str, stream: bool
) -> None:
    with waiting_requests(small, 1, 1):
        ask = small.chat if path == CHAT else small.complete
        response = ask(stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "server_unavailable")
        assert "2 choices wait" in error["message"]
        assert small.client.get("/health").status_code == 200
        release.set()
    small.wait_until_idle()
    assert small.chat(max_tokens=1).status_code == 200


def test_choices_count_one_by_one(small: LiveServer, release: threading.Event) -> None:
    with waiting_requests(small, 1):
        assert small.chat(n=2).status_code == 503
        assert small.complete(["One", "Two"]).status_code == 503
        release.set()
    small.wait_until_idle()
    # Alone, even more than may wait are served, one after the other.
    assert len(small.complete(["One", "Two", "Three", "Four"]).json()["choices"]) == 4


def test_refused_requests_leave_the_queue(small: LiveServer) -> None:
    for _ in range(5):
        assert small.complete("x" * 5000).status_code == 400
        assert small.complete([[99999999]]).status_code == 400
    assert small.async_engine._waiting_room.num_waiting == 0


# --- the longest time of a request


@pytest.fixture
def finished(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """Ends of requests, of a server that limits their time and whose steps take some."""
    step, pause = server.engine.step, threading.Event()

    def slow_step() -> Any:
        pause.wait(0.002)
        return step()

    monkeypatch.setattr(server.engine, "step", slow_step)
    monkeypatch.setattr(server.async_engine, "_request_timeout", 1000)
    events: list[Event] = []
    server.engine.events.subscribe(events.append, Finished)
    yield events
    server.engine.events.unsubscribe(events.append)


def let_time_pass(server: LiveServer) -> None:
    """The limit of every request that runs is reached now."""
    engine = server.async_engine
    assert engine._loop is not None
    for consumer in {flight.consumer for flight in engine.replicas._in_flight.values()}:
        engine._loop.call_soon_threadsafe(engine._expire, consumer)


def reasons(events: list[Event]) -> list[str]:
    return [event.reason for event in events if isinstance(event, Finished)]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(
    server: LiveServer, finished: list[Event], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(server.async_engine, "_request_timeout", 1e-6)
    response = server.chat(n=2, stream=stream, **ENDLESS)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_timeout")
    assert "1e-06 seconds" in error["message"]
    wait_for(lambda: reasons(finished) == ["abort"] * 2)  # perhaps they had not begun
    server.wait_until_idle()


def test_an_answer_in_time_is_whole(server: LiveServer, finished: list[Event]) -> None:
    assert server.chat(max_tokens=3, ignore_eos=True).status_code == 200
    assert reasons(finished) == ["length"]
    assert server.async_engine.replicas._in_flight == {}


def test_a_stream_that_takes_too_long_says_so_and_is_done(
    server: LiveServer, finished: list[Event]
) -> None:
    body = {"messages": HELLO, "stream": True, **ENDLESS}
    with server.client.stream("POST", CHAT, json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        assert "assistant" in next(lines)
        let_time_pass(server)
        *_, error, done = lines
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert done == "data: [DONE]"
    server.wait_until_idle()
    assert reasons(finished) == ["abort"]


def test_time_passes_for_a_client_that_does_not_read(
    server: LiveServer, finished: list[Event]
) -> None:
    with deaf_client(server, {"messages": HELLO, "stream": True, **ENDLESS}):
        wait_for(server.engine.has_unfinished)
        let_time_pass(server)
        wait_for(lambda: reasons(finished) == ["abort"])
        server.wait_until_idle()


# --- clients


def address(server: LiveServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


@contextlib.contextmanager
def deaf_client(server: LiveServer, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Has sent its request and reads nothing of the answer."""
    content = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address(server))
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(content), content)
        )
        yield connection


def test_a_client_that_never_reads_holds_up_nobody(server: LiveServer) -> None:
    """Its answer waits for it, its KV blocks are free."""
    events: list[Event] = []
    server.engine.events.subscribe(events.append, Finished)
    body = {"messages": HELLO, "stream": True, "n": 4, "max_tokens": 500, "ignore_eos": True}
    with deaf_client(server, body | {"logprobs": True, "top_logprobs": 20}) as deaf:
        assert server.chat(max_tokens=2).status_code == 200
        wait_for(lambda: len(events) == 5)
        server.wait_until_idle()
        assert deaf.recv(8) == b"HTTP/1.1"
    server.engine.events.unsubscribe(events.append)
    assert server.chat(max_tokens=2).status_code == 200


def test_half_open_connections_hold_up_nobody(server: LiveServer) -> None:
    """Nothing came, half a head, or half a body."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    starts = (b"", head.encode(), f"{head}Content-Length: 500\r\n\r\n{{".encode())
    with contextlib.ExitStack() as stack:
        for index in range(200):
            connection = stack.enter_context(socket.create_connection(address(server)))
            connection.sendall(starts[index % len(starts)])
        assert server.chat(max_tokens=2).status_code == 200
        assert server.async_engine._waiting_room.num_waiting == 0
    server.wait_until_idle()
    assert server.chat(max_tokens=2).status_code == 200
