"""Runs the application until a signal: engine first, socket next, engine's end last."""

import asyncio
import contextlib
import logging
import socket
from types import FrameType

from mini_infer.core.errors import EngineDeadError, InvalidConfigError

try:
    import uvicorn

    from mini_infer.serving.app import create_app
    from mini_infer.serving.gate import access_logger
except ImportError as error:
    raise InvalidConfigError(
        f"the server needs the package {error.name}: pip install 'mini-infer[serve]'"
    ) from None

from mini_infer.runtime.async_engine import AsyncEngine
from mini_infer.runtime.replica_starters import ReplicaStarters
from mini_infer.runtime.resolve import load_tokenizer
from mini_infer.runtime.routing.router import load_router
from mini_infer.serving.connections import HalfOpen, half_open_limit, raise_descriptor_limit
from mini_infer.serving.listener import bind, url_of
from mini_infer.serving.options import ServerOptions
from mini_infer.serving.server_metrics import ServerMetrics
from mini_infer.serving.status_line import StatusLine, status_logger

SHUTDOWN_GRACE = 5
"""Seconds that running requests may still take after the first signal."""
LAST_WORDS_GRACE = 1
"""Seconds that clients then have to read how their requests ended."""


def run_server(
    starters: ReplicaStarters, host: str, port: int, options: ServerOptions | None = None
) -> None:
    """Loads engines and serves them on ``host:port`` until SIGINT or SIGTERM, then ends them.

    Port 0 takes a free one. Prints the URL as the end of a line, when requests can be sent.

    Raises:
        InvalidConfigError: the address can't be listened on.
        EngineDeadError: the last engine died, and could not be started again.
        MiniInferError: an option, the model or its weights can't be used.
    """
    options = options or ServerOptions()
    if options.access_log:
        _log_to_stderr(access_logger)
    if options.log_interval:
        _log_to_stderr(status_logger)
    router = load_router(options.router)
    tokenizer = load_tokenizer(starters.locate())  # while the engines load the weights
    engine = AsyncEngine(
        starters.start(),
        tokenizer,
        starters=starters.each,
        router=router,
        max_num_queued=options.max_num_queued,
        request_timeout=options.request_timeout,
    )
    metrics = ServerMetrics(engine.config, len(starters.each))
    try:
        with bind(host, port) as listener, StatusLine(metrics, options.log_interval):
            half_open = HalfOpen(half_open_limit(raise_descriptor_limit()))
            config = uvicorn.Config(
                create_app(engine, options, metrics),
                http=half_open.protocol(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2 * SHUTDOWN_GRACE,
            )
            url = url_of(host, listener.getsockname()[1])
            name = engine.config.served_model_name
            served = "dry run (invented tokens)" if engine.config.dry_run else name
            announcement = f"{served} is served at {url}\nchat page at /, API at /v1, Ctrl-C stops"
            _Server(config, engine, announcement).run([listener])
    finally:
        engine.shutdown()
    if engine.replicas.why_given_up:
        raise EngineDeadError(engine.replicas.why_given_up)


def _log_to_stderr(logger: logging.Logger) -> None:
    """Lines go to standard error; the announcement has standard output for itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Server(uvicorn.Server):
    """Says when it is ready, and returns after a signal instead of raising it again.

    The first signal lets running requests finish for a while and has new ones refused, a second
    one ends that while. What then still runs ends with an error object. Only the connection of a
    client that does not read it, or that never sent the rest of its request, is cut. An engine that
    died for good is as good as both signals.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, announcement: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._announcement = announcement
        self._hurry = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._engine.start()
        self._watcher = asyncio.create_task(self._end_with_engine())
        with contextlib.suppress(OSError):  # a full disk behind it is no reason not to serve
            print(self._announcement, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._exit()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()
        if self._watcher:
            self._watcher.cancel()

    def _exit(self) -> None:
        if self.should_exit:
            self._hurry.set()
        self._engine.drain()
        self.should_exit = True

    async def _end_with_engine(self) -> None:
        await self._engine.replicas.given_up.wait()
        self._exit()
        self._exit()

    async def _end_requests(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), SHUTDOWN_GRACE)
        self._engine.end_requests()
        await asyncio.sleep(LAST_WORDS_GRACE)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
