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
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from mini_infer.core.errors import EngineDeadError, InvalidRequestError, MiniInferError
from mini_infer.core.outputs import RequestDelta
from mini_infer.core.sampling_params import SamplingParams

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


class _Consumer:
    """Where the deltas of one stream wait. Used by the event loop's thread only.

    Unbounded, because the engine must not wait; but a request makes at most its ``max_tokens``
    deltas per choice, so a consumer that stalls holds no more than its own answer.
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.unfinished = dict.fromkeys(request_ids)
        self.error: Exception | None = None
        self._ready: list[RequestDelta] = []
        self._wakeup = asyncio.Event()

    def push(self, delta: RequestDelta) -> None:
        self._ready.append(delta)
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._wakeup.set()

    async def take(self) -> list[RequestDelta]:
        """All deltas that are there; waits for the first one. [] when all requests finished.

        Raises:
            Exception: what ``fail`` was given, after the deltas that came before it.
        """
        while not self._ready:
            if self.error:
                raise self.error
            if not self.unfinished:
                return []
            self._wakeup.clear()
            await self._wakeup.wait()
        ready, self._ready = self._ready, []
        return ready


class AsyncEngine:
    """Serves many concurrent callers of one event loop from one ``LLMEngine``.

    The engine's thread starts with the first request, and belongs to the event loop that made it.
    """

    def __init__(self, engine: "LLMEngine") -> None:
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Calls for the engine's thread; None ends it."""
        self._consumers: dict[str, _Consumer] = {}
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
        """
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

        processed = await run_off_loop(length, process_all)
        self._start()
        consumer = _Consumer(list(prompts))
        for request_id in prompts:
            if request_id in self._consumers:
                raise InvalidRequestError(f"request id {request_id!r} is in use", "request_id")
        for request_id, request in zip(prompts, processed, strict=True):
            self._consumers[request_id] = consumer
            self._inbox.put(partial(self._add, request_id, request))
        try:
            while deltas := await consumer.take():
                yield deltas
        finally:
            for request_id in consumer.unfinished:
                del self._consumers[request_id]
                self._inbox.put(partial(self._engine.abort, request_id, silently=True))

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
        try:
            self._engine.add(request)
        except MiniInferError as error:
            self._rejections.append((request_id, error))

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

    def _forget(self, request_id: str, consumer: _Consumer) -> None:
        del self._consumers[request_id]
        del consumer.unfinished[request_id]

    def _fail_all(self, death: str) -> None:
        for request_id, consumer in list(self._consumers.items()):
            self._forget(request_id, consumer)
            consumer.fail(EngineDeadError(death))


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
