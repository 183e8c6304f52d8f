"""A client that hangs up frees what its request held, streamed or not."""

import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anyio
import pytest
from starlette.requests import ClientDisconnect

from mini_infer.core.errors import EngineDeadError
from mini_infer.core.events import Admitted, Event, Finished
from mini_infer.serving.sse import EventStreamResponse, end_with_done, until_disconnect
from tests.serving.live import CHAT, COMPLETIONS, LiveServer, wait_for

ENDLESS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], **ENDLESS}
BODIES = {
    "chat": (CHAT, CHAT_BODY, 1),
    "chat with n": (CHAT, CHAT_BODY | {"n": 3}, 3),
    "batch": (COMPLETIONS, {"prompt": ["One", "Two"], **ENDLESS}, 2),
}
"""Path, body, and how many of the engine's requests it becomes."""


@pytest.fixture
def slow(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Events of a server whose requests run until they are aborted: it has no token limit to reach
    in a test's time."""
    step = server.engine.step
    pause = threading.Event()

    def slow_step() -> Any:
        pause.wait(0.002)
        return step()

    monkeypatch.setattr(server.engine, "step", slow_step)
    events: list[Event] = []
    server.engine.events.subscribe(events.append)
    return events


@contextlib.contextmanager
def asked(server: LiveServer, path: str, body: str) -> Iterator[None]:
    """A request of a client that hangs up at the end, and has read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        yield


def aborted(events: list[Event]) -> int:
    return sum(isinstance(event, Finished) and event.reason == "abort" for event in events)


@pytest.mark.parametrize("name", BODIES)
def test_hanging_up_on_a_stream_aborts(server: LiveServer, slow: list[Event], name: str) -> None:
    path, body, num_requests = BODIES[name]
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert next(response.iter_lines()).startswith("data: ")
    server.wait_until_idle()
    assert aborted(slow) == num_requests


@pytest.mark.parametrize("name", BODIES)
def test_hanging_up_while_waiting_for_an_answer_aborts(
    server: LiveServer, slow: list[Event], name: str
) -> None:
    path, body, num_requests = BODIES[name]
    with asked(server, path, json.dumps(body)):
        wait_for(lambda: sum(isinstance(event, Admitted) for event in slow) == num_requests)
    server.wait_until_idle()
    assert aborted(slow) == num_requests


def test_hanging_up_before_the_first_token_aborts(
    server: LiveServer, slow: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response has not begun then."""
    step = server.engine.step
    held: list[bool] = [True]
    monkeypatch.setattr(server.engine, "step", lambda: [] if held[0] else step())
    with asked(server, CHAT, json.dumps(CHAT_BODY | {"stream": True})):
        wait_for(server.engine.has_unfinished)
    wait_for(lambda: aborted(slow) == 1)
    held[0] = False
    server.wait_until_idle()


async def test_work_that_is_done_is_returned() -> None:
    async def receive() -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    async def work() -> int:
        return 5

    assert await until_disconnect(receive, work()) == 5


async def test_work_is_cancelled_by_a_disconnect() -> None:
    cancelled = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(True)

    with pytest.raises(ClientDisconnect):
        await until_disconnect(receive, work())
    assert cancelled == [True]


async def test_a_client_that_stops_reading_and_hangs_up_closes_the_generator() -> None:
    """Cancelled while it sends, the generator is not waiting for anything itself."""
    closed = []
    blocked = anyio.Event()

    async def events() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "data: x\n\n"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await anyio.sleep_forever()

    async def receive() -> dict[str, Any]:
        await blocked.wait()
        return {"type": "http.disconnect"}

    await EventStreamResponse(events())({"type": "http"}, receive, send)
    assert closed == [True]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (EngineDeadError("the engine failed"), "the engine failed"),
        (KeyError("x"), "internal error"),
    ],
    ids=["typed", "unexpected"],
)
async def test_a_failure_in_the_middle_is_an_error_object_before_done(
    error: Exception, text: str
) -> None:
    async def events() -> AsyncGenerator[str, None]:
        yield "data: 2\n\n"
        raise error

    parts = [part async for part in end_with_done("data: 1\n\n", events())]
    assert parts[:2] == ["data: 1\n\n", "data: 2\n\n"]
    assert parts[-1] == "data: [DONE]\n\n"
    assert len(parts) == 4
    assert text in parts[2]
    assert parts[2].startswith('data: {"error":{"message":')
