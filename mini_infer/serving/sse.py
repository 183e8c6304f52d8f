"""Server-sent events, and what a client that hangs up means."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_infer.core.errors import MiniInferError
from mini_infer.serving.errors import error_object, to_error_object

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = "data: [DONE]\n\n"
ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
"""One for all: ``json.dumps`` builds one a call, a quarter of a short chunk's time."""


def to_json(value: Any) -> str:
    """Compact JSON; text stays readable UTF-8."""
    return ENCODER.encode(value)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs ``work``, and cancels it when the client hangs up, which aborts its requests.

    Raises:
        ClientDisconnect: the client hung up first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.wait((task, watcher))


async def first_of(receive: Receive, events: AsyncGenerator[str, None]) -> str:
    """Waits for a stream's first event: what fails before it has a status of its own.

    Raises:
        ClientDisconnect: the client hung up first.
    """

    async def first() -> str:
        return await anext(events)

    return await until_disconnect(receive, first())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """Sends the events of a generator as they come, and closes it when the client hangs up.

    Starlette's own streaming response notices that only while it sends, or leaves the generator to
    the garbage collector; a request would go on taking the engine's time.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_event = scope.get("state", {}).get("send_event", send)
        with contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, self._send_all(send, send_event))

    async def _send_all(self, send: Send, send_event: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for events in self._events:
                await send_event(
                    {"type": "http.response.body", "body": events.encode(), "more_body": True}
                )
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def end_with_done(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """``first``, the events, and ``[DONE]``; a failure becomes an error object before it."""
    async with contextlib.aclosing(events):
        yield first
        try:
            async for event in events:
                yield event
        except MiniInferError as error:
            yield f"data: {to_json(to_error_object(error))}\n\n"
        except Exception:
            logger.exception("a stream failed")
            yield f"data: {to_json(error_object('internal error', 500))}\n\n"
        yield DONE
