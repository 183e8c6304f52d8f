"""``AsyncEngine``: text in, text out, for many callers of one event loop; steps in other processes.

::

    event loop                                      engines' processes
    stream() ── InputProcessor ── Add, Finish ────► EngineCore.add, finish
       ▲                      ReplicaSet            EngineCore.step
       └──── OutputProcessor ◄── News, one a step ──────┘

The loop never waits for a step. A step waits for the loop only where that is many steps behind.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from mini_infer.core.errors import (
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from mini_infer.core.outputs import RequestDelta
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.delta_consumer import Consumer
from mini_infer.runtime.engine_client import ServerEvents
from mini_infer.runtime.engine_process import EngineHost
from mini_infer.runtime.engine_restarts import Starter
from mini_infer.runtime.input_processor import InputProcessor
from mini_infer.runtime.output_processor import OutputProcessor
from mini_infer.runtime.replica_set import ReadyRequest, ReplicaSet
from mini_infer.runtime.routing.router import Router
from mini_infer.runtime.waiting_room import MAX_NUM_QUEUED, WaitingRoom

if TYPE_CHECKING:
    from mini_infer.core.engine_config import EngineConfig
    from mini_infer.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SHUT_DOWN = "the engine was shut down"
OFF_LOOP_LENGTH = 8192
"""Prompts longer than this (characters or ids) are tokenised in a worker thread: the event loop
would otherwise stall every other stream for milliseconds."""


async def run_off_loop(
    length: int,
    function: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Calls a thread-safe ``function``, in a worker thread if its input has a great ``length``."""
    if length > OFF_LOOP_LENGTH:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


class AsyncEngine:
    """Serves many concurrent callers of one event loop from engines in other processes.

    It belongs to the event loop that makes the first call of ``start`` or of a request. An engine
    that dies takes its requests with it, unless another one can have them, and is started again
    (``ReplicaSet``).
    """

    def __init__(
        self,
        hosts: Sequence[EngineHost],
        tokenizer: "Tokenizer",
        *,
        starters: Sequence[Starter] = (),
        router: Router | None = None,
        max_num_queued: int = MAX_NUM_QUEUED,
        request_timeout: float | None = None,
    ) -> None:
        """``hosts`` have engines of the same options, among which ``router`` chooses, by default
        in turn. ``starters``, one for each, load another host where one died; without them it
        stays dead. ``max_num_queued`` choices may wait for their first step, and a request may take
        ``request_timeout`` seconds."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.tokenizer = tokenizer
        self.events = ServerEvents(len(hosts), self._on_subscription)
        self._waiting_room = WaitingRoom(self.events, max_num_queued)
        outputs = OutputProcessor(tokenizer, self.events)
        self.replicas = ReplicaSet(
            hosts, starters, router, self.events, self._waiting_room, outputs
        )
        self.config: EngineConfig = self.replicas.config
        self.input_processor = InputProcessor(self.config, tokenizer)
        self._request_timeout = request_timeout
        self._draining = False

    @property
    def healthy(self) -> bool:
        """False while no engine runs: they died, or were shut down."""
        return self.replicas.running

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestDelta]:
        """Yields the deltas of one request, of all its choices.

        Closing the iterator, or cancelling the task that waits for it, aborts the request.

        Raises:
            InvalidRequestError: the request can't be served as it stands.
            EngineDeadError: the engine failed, before or during the request.
        """
        stream = self.stream({request_id: prompt}, params, priority=priority, cache_salt=cache_salt)
        async with contextlib.aclosing(stream):
            async for deltas in stream:
                for delta in deltas:
                    yield delta

    async def stream(
        self,
        prompts: Mapping[str, Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> AsyncGenerator[list[RequestDelta], None]:
        """Like ``generate`` for several prompts, by request id; yields all deltas that are there.

        A fast consumer gets one list per step, a slow one gets longer lists. If one prompt is
        refused then none is served. Without ``stream`` each choice has one delta, at its end, which
        spares the engine the making of the others.

        Raises:
            InvalidRequestError: a request can't be served as it stands.
            UnavailableError: too many choices wait, or the server is shutting down.
            RequestTimeoutError: it took longer than ``request_timeout``; the requests are aborted.
            EngineDeadError: the engine failed, before or during the requests.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        length = sum(len(prompt) for prompt in prompts.values())
        process = partial(
            self.input_processor.process,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            stream=stream,
        )

        def process_all() -> list[ReadyRequest]:
            requests = [
                process(request_id, prompt, params) for request_id, prompt in prompts.items()
            ]
            return [self.replicas.ready(request) for request in requests]

        num_choices = len(prompts) * params.n
        self.check_open()
        self._waiting_room.enter(num_choices)
        try:
            await self.input_processor.compile_grammar(params)
            ready = await run_off_loop(length, process_all)
            self.start()
            await self.replicas.until_free(
                choice.request_id
                for request in ready
                for choice in request.processed.requests
                if request.processed.request_id not in self.replicas
            )
            self.check_alive()
            for request_id in prompts:
                if request_id in self.replicas:
                    raise InvalidRequestError(f"request id {request_id!r} is in use", "request_id")
            consumer = self.replicas.open(ready)
        except BaseException:
            self._waiting_room.leave(num_choices)
            raise
        timer = None
        if self._request_timeout is not None:
            timer = loop.call_at(start + self._request_timeout, self._expire, consumer)
        try:
            while deltas := await consumer.take():
                yield deltas
        finally:
            if timer:
                timer.cancel()
            self.replicas.abandon(consumer)

    def check_alive(self) -> None:
        """Raises EngineDeadError while there is no engine, which says why."""
        self.replicas.check_running()

    def check_open(self) -> None:
        """Raises UnavailableError once ``drain`` was called or while too many choices wait, and
        EngineDeadError while there is no engine: what is expensive to prepare asks first."""
        self.check_alive()
        if self._draining:
            raise UnavailableError("the server is shutting down: send the request to another one")
        self._waiting_room.check()

    def drain(self) -> None:
        """Takes no new requests from now on; those that run go on."""
        self._draining = True

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, between two steps.

        Raises:
            EngineDeadError: the engine failed.
        """
        await self._call("reset_prefix_cache")

    async def start_profile(self) -> None:
        """Records the engine's thread, and the device, from the next step on.

        Raises:
            InvalidRequestError: it is being recorded, or there is no torch.
            EngineDeadError: the engine failed.
        """
        await self._call("start_profile")

    async def stop_profile(self, folder: Path) -> list[Path]:
        """Ends the recording and has each engine's process write it into ``folder``; the files.

        Raises:
            InvalidRequestError: nothing is being recorded.
            EngineDeadError: the engine failed.
        """
        paths = await self._call("stop_profile", str(folder.absolute()))
        return [Path(path) for path in paths if path is not None]

    def start(self) -> None:
        """Listens to the engines, in the running event loop. Idempotent."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self.replicas.start(loop)
        elif self._loop is not loop:
            raise RuntimeError("an AsyncEngine serves one event loop; build one per loop")

    def end_requests(self) -> None:
        """Ends every request with ``EngineDeadError``; in the event loop, or when that is gone."""
        self.replicas.end_requests(SHUT_DOWN)

    def shutdown(self) -> None:
        """Ends the requests and the engines. Idempotent; waits for the engines' ends."""
        self.end_requests()
        self.input_processor.close()
        self.replicas.close()

    def _expire(self, consumer: Consumer) -> None:
        if consumer.unfinished:
            self.replicas.abandon(consumer)
            consumer.fail(
                RequestTimeoutError(
                    f"the request took longer than {self._request_timeout:g} seconds, which is "
                    f"this server's limit: ask for fewer tokens"
                )
            )

    async def _call(self, function: str, *arguments: str) -> list[str | None]:
        self.check_alive()
        self.start()
        return await self.replicas.call(function, *arguments)

    def _on_subscription(self) -> None:
        """On whatever thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.replicas.listen)
