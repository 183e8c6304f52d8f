"""What a request passes before a route sees it: request id, access log, CORS, API key, body size.

Each is plain ASGI around the application. What wraps ``send`` looks at how an answer begins; a
stream's events go past all of it, as each layer would be a call more per token.
"""

import asyncio
import hmac
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Iterable
from hashlib import sha256

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_infer.serving.errors import error_object
from mini_infer.serving.options import ServerOptions

access_logger = logging.getLogger("mini_infer.access")

OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/ping", "/version"})
"""What answers without a key: probes, scrapers, and the page that asks for one."""
BODY_PAUSE = 30.0
"""Seconds after which who sends nothing more of a body is not waited for."""
MAX_ID_LENGTH = 128
CLIENT_CLOSED_REQUEST = 499


def gated(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """``app`` behind all gates that the options ask for."""
    app = BodyLimit(app, options.max_body_size, options.request_timeout)
    if options.api_keys:
        app = KeyCheck(app, options.api_keys)
    if options.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        # Around the check of keys: a preflight request has none, and a page may read a refusal.
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    if options.access_log:
        app = AccessLog(app)
    return RequestIds(app)


class RequestIds:
    """Answers with the caller's ``X-Request-Id``, or one of ours; other layers find it in the
    scope's state, and the server's own ``send`` for the events of a stream that has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _header(scope, b"x-request-id")
        if request_id is None or not _is_loggable(request_id):
            request_id = uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state["send_event"] = send

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = (*message.get("headers", ()), (b"x-request-id", request_id))
                message = {**message, "headers": headers}
            return send(message)

        await self._app(scope, receive, send_with_id)


class AccessLog:
    """One line per request, when it is over: client, request, status, duration, request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED_REQUEST
        start = time.perf_counter()

        def send_and_look(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            host, port = scope.get("client") or ("-", 0)
            access_logger.info(
                '%s:%d "%s %s" %d %.1f ms %s',
                host,
                port,
                scope["method"],
                # As it was sent: a decoded path could break the line. Queries may hold secrets.
                scope.get("raw_path", b"").decode("ascii", "backslashreplace"),
                status,
                1e3 * (time.perf_counter() - start),
                scope["state"]["request_id"],
            )


class KeyCheck:
    """Lets pass who sends one of the keys as ``Authorization: Bearer KEY``.

    All keys are compared, by digests, so that the time it takes says nothing about any.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        refusal = JSONResponse(
            error_object(
                "a valid API key is needed: send it in the header Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
            ),
            401,
            {"www-authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        digest = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


class BodyLimit:
    """Refuses a body above ``limit`` bytes: by its declared length, before any of it is read, or
    while it comes in chunks; and one that takes longer than ``timeout`` seconds, or of which
    nothing comes for ``BODY_PAUSE`` seconds."""

    def __init__(self, app: ASGIApp, limit: int, timeout: float | None = None) -> None:
        self._app = app
        self._limit = limit
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            length = _header(scope, b"content-length")
            # Where both are given, the chunks say how long it is.
            chunked = _header(scope, b"transfer-encoding") is not None
            if not chunked and length is not None and _to_int(length) > self._limit:
                refusal = JSONResponse(error_object(self._message, 413), 413)
                await refusal(scope, receive, send)
                return
            receive = self._limited(receive)
        await self._app(scope, receive, send)

    @property
    def _message(self) -> str:
        return f"the body is larger than this server allows ({self._limit} bytes): send less"

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0
        complete = False
        now = asyncio.get_running_loop().time
        deadline = math.inf if self._timeout is None else now() + self._timeout

        async def receive_and_count() -> Message:
            nonlocal num_bytes, complete
            if complete:  # what still comes is the client's end, at any time
                return await receive()
            # Chosen before the wait: the loop's timers may fire a tick before their time.
            pause_ends = now() + BODY_PAUSE
            late = self._timeout if deadline < pause_ends else BODY_PAUSE
            try:
                async with asyncio.timeout_at(min(deadline, pause_ends)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"the rest of the body did not come within {late:g} seconds",
                    {"connection": "close"},
                ) from None
            complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                # What still comes has no end that anybody knows.
                raise HTTPException(413, self._message, {"connection": "close"})
            return message

        return receive_and_count


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def _is_loggable(request_id: bytes) -> bool:
    return 0 < len(request_id) <= MAX_ID_LENGTH and all(32 < byte < 127 for byte in request_id)


def _to_int(length: bytes) -> float:
    return int(length) if length.isdigit() and len(length) < 20 else float("inf")
