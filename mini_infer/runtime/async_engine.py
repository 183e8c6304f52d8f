"""``AsyncEngine``: the engine's steps in a thread of their own, its deltas in an event loop.

::

    event loop                      engine thread
    stream() -- add, abort --> inbox --> engine.add / engine.abort
       ^                                 engine.step()
       +------ one call per step ------- deltas

The loop never waits for a step and a step never waits for a consumer. The engine itself is touched
by its thread only; the exceptions are its input processor and its event stream's subscribers, which
are safe to share.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mini_infer.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    MiniInferError,
    RequestTimeoutError,
    UnavailableError,
)
from mini_infer.core.outputs import RequestDelta
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.delta_consumer import Consumer
from mini_infer.runtime.engine_profiler import EngineProfiler
from mini_infer.runtime.waiting_room import MAX_NUM_QUEUED, WaitingRoom

if TYPE_CHECKING:
    from mini_infer.core.engine_config import EngineConfig
    from mini_infer.core.events import EventStream
    from mini_infer.runtime.engine import LLMEngine
    from mini_infer.runtime.input_processor import ProcessedRequest
    from mini_infer.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

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
    """Serves many concurrent callers of one event loop from one ``LLMEngine``.

    The engine's thread starts with the first request, and belongs to the event loop that made it.
    """

    def __init__(
        self,
        engine: "LLMEngine",
        *,
        max_num_queued: int = MAX_NUM_QUEUED,
        request_timeout: float | None = None,
    ) -> None:
        """``max_num_queued`` choices may wait for their first step, and a request may take
        ``request_timeout`` seconds."""
        self._engine = engine
        self._waiting_room = WaitingRoom(engine.events, max_num_queued)
        self._request_timeout = request_timeout
        self._profiler = EngineProfiler()
        self._draining = False
        self._calls: set[asyncio.Future[Any]] = set()
        """Of ``_call_engine``, not yet answered."""
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Calls for the engine's thread; None ends it."""
        self._consumers: dict[str, Consumer] = {}
        self._rejections: list[tuple[str, Exception]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._death: str | None = None
        """Why the engine ended; None while it serves."""

    @property
    def config(self) -> "EngineConfig":
        return self._engine.config

    @property
    def tokenizer(self) -> "Tokenizer":
        return self._engine.tokenizer

    @property
    def events(self) -> "EventStream":
        return self._engine.events

    @property
    def healthy(self) -> bool:
        """False once the engine failed or was shut down."""
        return self._death is None

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
            self._engine.input_processor.process,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            stream=stream,
        )

        def process_all() -> "list[ProcessedRequest]":
            return [process(request_id, prompt, params) for request_id, prompt in prompts.items()]

        num_choices = len(prompts) * params.n
        self.check_open()
        self._waiting_room.enter(num_choices)
        try:
            processed = await run_off_loop(length, process_all)
            self._start()
            for request_id in prompts:
                if request_id in self._consumers:
                    raise InvalidRequestError(f"request id {request_id!r} is in use", "request_id")
        except BaseException:
            self._waiting_room.leave(num_choices)
            raise
        consumer = Consumer(list(prompts))
        for request_id, request in zip(prompts, processed, strict=True):
            self._consumers[request_id] = consumer
            self._inbox.put(partial(self._add, request_id, request))
        timer = None
        if self._request_timeout is not None:
            timer = loop.call_at(start + self._request_timeout, self._expire, consumer)
        try:
            while deltas := await consumer.take():
                yield deltas
        finally:
            if timer:
                timer.cancel()
            self._abandon(consumer)

    def check_open(self) -> None:
        """Raises UnavailableError once ``drain`` was called or while too many choices wait, and
        EngineDeadError after the end: what is expensive to prepare asks first."""
        if self._death:
            raise EngineDeadError(self._death)
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
        await self._call_engine(self._engine.reset_prefix_cache)

    async def start_profile(self) -> None:
        """Records the engine's thread, and the device, from the next step on.

        Raises:
            InvalidRequestError: it is being recorded, or there is no torch.
            EngineDeadError: the engine failed.
        """
        await self._call_engine(self._profiler.start)

    async def stop_profile(self, folder: Path) -> Path:
        """Ends the recording and writes it into ``folder``; returns the file.

        Raises:
            InvalidRequestError: nothing is being recorded.
            EngineDeadError: the engine failed.
        """
        save = await self._call_engine(self._profiler.stop)
        return await asyncio.to_thread(save, folder)

    def shutdown(self) -> None:
        """Ends every request with ``EngineDeadError``, the thread and the engine. Idempotent."""
        if self._thread is None:
            if self.healthy:
                self._death = SHUT_DOWN
                self._engine.shutdown()
            return
        self._inbox.put(None)
        self._thread.join()

    def _start(self) -> None:
        if self._death:
            raise EngineDeadError(self._death)
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._loop = loop
            self._thread = threading.Thread(
                target=self._run, args=(loop,), name="mini-infer-engine", daemon=True
            )
            self._thread.start()
        elif self._loop is not loop:
            raise RuntimeError("an AsyncEngine serves one event loop; build one per loop")

    async def _call_engine(self, function: Callable[[], Result]) -> Result:
        """Calls ``function`` on the engine's thread, between two steps."""
        self._start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        self._calls.add(answer)
        self._inbox.put(partial(self._answer, loop, answer, function))
        try:
            return await answer
        finally:
            self._calls.discard(answer)

    # --- engine's thread ---

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        death = SHUT_DOWN
        try:
            while self._obey():
                deltas = self._engine.step()
                rejections, self._rejections = self._rejections, []
                if (deltas or rejections) and not _call(loop, self._deliver, deltas, rejections):
                    break
        except Exception:
            logger.exception("the engine failed")
            death = "the engine failed, the server's log says why: restart it"
        self._death = death
        _call(loop, self._fail_all, death)
        self._engine.shutdown()

    def _obey(self) -> bool:
        """Runs the calls in the inbox, waiting for one while the engine is idle.

        Returns False when the thread should end.
        """
        block = not self._engine.has_unfinished()
        while True:
            try:
                call = self._inbox.get(block)
            except Empty:
                return True
            if call is None:
                return False
            call()
            block = False

    def _add(self, request_id: str, request: "ProcessedRequest") -> None:
        self._waiting_room.pass_on(len(request.requests))
        try:
            self._engine.add(request)
        except MiniInferError as error:
            self._rejections.append((request_id, error))

    def _answer(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: "asyncio.Future[Result]",
        function: Callable[[], Result],
    ) -> None:
        try:
            result = function()
        except Exception as error:  # the caller's, not the engine's
            _call(loop, _settle, answer, error=error)
        else:
            _call(loop, _settle, answer, result)

    # --- event loop ---

    def _deliver(
        self, deltas: Sequence[RequestDelta], rejections: Sequence[tuple[str, Exception]]
    ) -> None:
        for delta in deltas:
            consumer = self._consumers.get(delta.request_id)
            if consumer:
                if delta.output:
                    self._forget(delta.request_id, consumer)
                consumer.push(delta)
        for request_id, error in rejections:
            consumer = self._consumers.get(request_id)
            if consumer:
                self._forget(request_id, consumer)
                consumer.fail(error)

    def _forget(self, request_id: str, consumer: Consumer) -> None:
        del self._consumers[request_id]
        del consumer.unfinished[request_id]

    def _abandon(self, consumer: Consumer) -> None:
        """Aborts what the consumer still waits for."""
        for request_id in list(consumer.unfinished):
            self._forget(request_id, consumer)
            self._inbox.put(partial(self._engine.abort, request_id, silently=True))

    def _expire(self, consumer: Consumer) -> None:
        if consumer.unfinished:
            self._abandon(consumer)
            consumer.fail(
                RequestTimeoutError(
                    f"the request took longer than {self._request_timeout:g} seconds, which is "
                    f"this server's limit: ask for fewer tokens"
                )
            )

    def _fail_all(self, death: str) -> None:
        for answer in self._calls:
            _settle(answer, error=EngineDeadError(death))
        for request_id, consumer in list(self._consumers.items()):
            self._forget(request_id, consumer)
            consumer.fail(EngineDeadError(death))


def _settle(
    answer: "asyncio.Future[Any]", result: object = None, *, error: Exception | None = None
) -> None:
    if answer.done():  # whoever asked is gone
        return
    if error:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _call(
    loop: asyncio.AbstractEventLoop,
    function: Callable[Arguments, None],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> bool:
    """Calls ``function`` in the loop's thread; False if the loop, with every consumer, is gone."""
    try:
        loop.call_soon_threadsafe(partial(function, *args, **kwargs))
    except RuntimeError:
        return False
    return True
