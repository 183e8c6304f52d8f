"""Runs the application until a signal: socket first, engine's end last."""

import asyncio
import contextlib
import errno
import logging
import socket
from types import FrameType
from typing import TYPE_CHECKING

from mini_infer.core.errors import InvalidConfigError

try:
    import uvicorn

    from mini_infer.serving.app import create_app
    from mini_infer.serving.gate import access_logger
except ImportError as error:
    raise InvalidConfigError(
        f"the server needs the package {error.name}: pip install 'mini-infer[serve]'"
    ) from None

from mini_infer.runtime.async_engine import AsyncEngine
from mini_infer.serving.metrics import EngineMetrics
from mini_infer.serving.options import ServerOptions
from mini_infer.serving.status_line import StatusLine, status_logger

if TYPE_CHECKING:
    from mini_infer.runtime.engine import LLMEngine

BACKLOG = 2048
SHUTDOWN_GRACE = 5
"""Seconds that running requests may still take after the first signal."""
LAST_WORDS_GRACE = 1
"""Seconds that clients then have to read how their requests ended."""


def run_server(
    engine: "LLMEngine", host: str, port: int, options: ServerOptions | None = None
) -> None:
    """Serves ``engine`` on ``host:port`` until SIGINT or SIGTERM, then shuts it down.

    Port 0 takes a free one. Prints the URL as the end of a line, when requests can be sent.

    Raises:
        InvalidConfigError: the address can't be listened on.
    """
    options = options or ServerOptions()
    if options.access_log:
        _log_to_stderr(access_logger)
    if options.log_interval:
        _log_to_stderr(status_logger)
    async_engine = AsyncEngine(
        engine,
        max_num_queued=options.max_num_queued,
        request_timeout=options.request_timeout,
    )
    metrics = EngineMetrics(engine.config)
    try:
        with bind(host, port) as listener, StatusLine(metrics, options.log_interval):
            config = uvicorn.Config(
                create_app(async_engine, options, metrics),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2 * SHUTDOWN_GRACE,
            )
            url = _url(host, listener.getsockname()[1])
            name = engine.config.served_model_name
            served = "dry run (invented tokens)" if engine.config.dry_run else name
            announcement = f"{served} is served at {url}\nchat page at /, API at /v1, Ctrl-C stops"
            _Server(config, async_engine, announcement).run([listener])
    finally:
        async_engine.shutdown()


def _log_to_stderr(logger: logging.Logger) -> None:
    """Lines go to standard error; the announcement has standard output for itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address.

    Raises:
        InvalidConfigError: the port is in use or not allowed, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfigError(f"can't listen on --host {host}: {error.strerror}") from None
    except UnicodeError:  # a label that is too long, or no text
        raise InvalidConfigError(f"--host {host!r:.80} is no host name") from None
    try:
        # Without it a restart would have to wait for the old connections' end.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two servers may bind one port with SO_REUSEADDR, but only one may listen on it.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        option = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise InvalidConfigError(
            f"can't listen on {host} port {port}: {error.strerror}; choose another with {option}"
        ) from None
    return listener


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


class _Server(uvicorn.Server):
    """Says when it is ready, and returns after a signal instead of raising it again.

    The first signal lets running requests finish for a while and has new ones refused, a second
    one ends that while. What then still runs ends with an error object. Only the connection of a
    client that does not read it, or that never sent the rest of its request, is cut.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, announcement: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._announcement = announcement
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._hurry.set()
        self._engine.drain()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), SHUTDOWN_GRACE)
        await asyncio.to_thread(self._engine.shutdown)
        await asyncio.sleep(LAST_WORDS_GRACE)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
