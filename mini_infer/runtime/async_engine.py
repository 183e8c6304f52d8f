"""``AsyncEngine``: text in, text out, for many callers of one event loop; steps in another process.

::

    event loop                                      engine's process
    stream() ── InputProcessor ── Add, Finish ────► EngineCore.add, finish
       ▲                                            EngineCore.step
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
    EngineDeadError,
    InvalidRequestError,
    RequestTimeoutError,
    SlowReaderError,
    UnavailableError,
)
from mini_infer.core.outputs import RequestDelta
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.choices_in_flight import ChoicesInFlight
from mini_infer.runtime.delta_consumer import MAX_BACKLOG, Consumer
from mini_infer.runtime.engine_client import EngineClient, ServerEvents
from mini_infer.runtime.engine_messages import Add, Finish, News, ToEngine
from mini_infer.runtime.engine_process import EngineHost
from mini_infer.runtime.engine_restarts import Restarts, Starter
from mini_infer.runtime.input_processor import InputProcessor, ProcessedRequest
from mini_infer.runtime.output_processor import OutputProcessor
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
    """Serves many concurrent callers of one event loop from one engine in another process.

    It belongs to the event loop that makes the first call of ``start`` or of a request. An engine
    that dies takes its requests with it, and is started again (``Restarts``).
    """

    def __init__(
        self,
        host: EngineHost,
        tokenizer: "Tokenizer",
        *,
        starter: Starter | None = None,
        max_num_queued: int = MAX_NUM_QUEUED,
        request_timeout: float | None = None,
    ) -> None:
        """``starter`` loads another host where the last one died; without one it stays dead.
        ``max_num_queued`` choices may wait for their first step, and a request may take
        ``request_timeout`` seconds."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.config: EngineConfig = host.config
        self.tokenizer = tokenizer
        self.events = ServerEvents(self._on_subscription)
        self.input_processor = InputProcessor(host.config, tokenizer)
        self._output_processor = OutputProcessor(tokenizer, self.events)
        self._waiting_room = WaitingRoom(self.events, max_num_queued)
        self._choices = ChoicesInFlight(self.events, self._waiting_room)
        self._request_timeout = request_timeout
        self._consumers: dict[str, Consumer] = {}
        self._draining = False
        self._death: str | None = None
        """Why requests can't be served, perhaps for a while; None while they are."""
        self._host = host
        self._client: EngineClient | None = None
        self._restarts = Restarts(starter, self._on_restarted, self._on_given_up)
        self.given_up = asyncio.Event()
        self.why_given_up: str | None = None
        """Set when the engine died and could not be started again, and why."""

    @property
    def healthy(self) -> bool:
        """False while the engine does not run: it died, or was shut down."""
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
            self.input_processor.process,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            stream=stream,
        )

        def process_all() -> list[tuple[ProcessedRequest, bytes]]:
            requests = [
                process(request_id, prompt, params) for request_id, prompt in prompts.items()
            ]
            return [(request, self._pack(request)) for request in requests]

        num_choices = len(prompts) * params.n
        self.check_open()
        self._waiting_room.enter(num_choices)
        try:
            await self.input_processor.compile_grammar(params)
            processed = await run_off_loop(length, process_all)
            self.start()
            await self._choices.until_free(
                item.request_id
                for request, _ in processed
                for item in request.requests
                if request.request_id not in self._consumers
            )
            self.check_alive()
            for request_id in prompts:
                if request_id in self._consumers:
                    raise InvalidRequestError(f"request id {request_id!r} is in use", "request_id")
        except BaseException:
            self._waiting_room.leave(num_choices)
            raise
        consumer = Consumer(list(prompts))
        for request, packed in processed:
            self._add(request, packed, consumer)
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

    def check_alive(self) -> None:
        """Raises EngineDeadError while there is no engine, which says why."""
        if self._death:
            raise EngineDeadError(self._death)

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

    async def stop_profile(self, folder: Path) -> Path:
        """Ends the recording and has the engine's process write it into ``folder``; the file.

        Raises:
            InvalidRequestError: nothing is being recorded.
            EngineDeadError: the engine failed.
        """
        path = await self._call("stop_profile", str(folder.absolute()))
        assert path is not None
        return Path(path)

    def start(self) -> None:
        """Listens to the engine, in the running event loop. Idempotent."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            if self.healthy:
                self._listen_to(self._host)
        elif self._loop is not loop:
            raise RuntimeError("an AsyncEngine serves one event loop; build one per loop")

    def end_requests(self) -> None:
        """Ends every request with ``EngineDeadError``; in the event loop, or when that is gone."""
        self._restarts.cancel()
        if self._client:
            self._client.detach()
        if self._death != SHUT_DOWN:
            self._death = SHUT_DOWN
            self._fail_all(SHUT_DOWN)

    def shutdown(self) -> None:
        """Ends the requests and the engine. Idempotent; waits for the engine's end."""
        self.end_requests()
        self.input_processor.close()
        self._host.close()

    # --- requests

    def _pack(self, request: ProcessedRequest) -> bytes:
        """Its ``Add``; on whatever thread."""
        try:
            return self._host.link.pack(Add.of(request.request_id, request.requests))
        except (OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                f"a parameter can't be passed on to the engine ({error}): integers have 64 bits "
                f"at most, and texts are valid Unicode"
            ) from None

    def _add(self, request: ProcessedRequest, packed: bytes, consumer: Consumer) -> None:
        self._consumers[request.request_id] = consumer
        self._output_processor.add(request)
        self._choices.add(item.request_id for item in request.requests)
        self._send(packed)

    def _forget(self, request_id: str, consumer: Consumer) -> None:
        del self._consumers[request_id]
        del consumer.unfinished[request_id]

    def _abandon(self, consumer: Consumer) -> None:
        """Aborts what the consumer still waits for."""
        for request_id in list(consumer.unfinished):
            self._forget(request_id, consumer)
            children = self._output_processor.unfinished_choices(request_id)
            self._send(Finish(children, "abort"))
            self._output_processor.abort(request_id)

    def _expire(self, consumer: Consumer) -> None:
        if consumer.unfinished:
            self._abandon(consumer)
            consumer.fail(
                RequestTimeoutError(
                    f"the request took longer than {self._request_timeout:g} seconds, which is "
                    f"this server's limit: ask for fewer tokens"
                )
            )

    # --- what the engine tells

    def _on_news(self, news: News) -> None:
        for event in news.happened():
            self.events.emit(event)
        for choice_id in news.unqueued:
            self._choices.refuse((choice_id,))
        for request_id, failure in news.refusals:
            self._refuse(request_id, failure.to_exception())
        if not news.updates:
            return
        for update in news.updates:
            if update.finish_reason == "error":  # perhaps before it was queued
                self._choices.refuse((update.request_id,))
        processed = self._output_processor.process(news.updates)
        for child_id, stop_string in processed.stopped:
            self._send(Finish([child_id], "stop", stop_string))
        for delta in processed.deltas:
            consumer = self._consumers.get(delta.request_id)
            if consumer:
                if delta.output:
                    self._forget(delta.request_id, consumer)
                consumer.push(delta)
                if consumer.backlog > MAX_BACKLOG:
                    self._abandon(consumer)
                    consumer.fail(
                        SlowReaderError("the stream was read too slowly: read as it comes")
                    )

    def _refuse(self, request_id: str, error: Exception) -> None:
        self._choices.refuse(self._output_processor.unfinished_choices(request_id))
        self._output_processor.abort(request_id)
        consumer = self._consumers.get(request_id)
        if consumer:
            self._forget(request_id, consumer)
            consumer.fail(error)

    # --- the engine's life

    def _listen_to(self, host: EngineHost) -> None:
        assert self._loop is not None
        self._host = host
        self._client = EngineClient(host, self._loop, self._on_news, self._on_end)
        self._send(self.events.wanted())

    def _send(self, message: ToEngine | bytes) -> None:
        if self._client:
            self._client.send(message)

    async def _call(self, function: str, *arguments: str) -> str | None:
        self.check_alive()
        self.start()
        assert self._client is not None
        return await self._client.call(function, *arguments)

    def _on_subscription(self) -> None:
        """On whatever thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._send(self.events.wanted()))

    def _on_end(self, how: str) -> None:
        self._death = self._restarts.begin(how, self._host)
        self._fail_all(self._death)

    def _on_restarted(self, host: EngineHost) -> None:
        self._listen_to(host)
        self._death = None

    def _on_given_up(self, why: str) -> None:
        self._death = self.why_given_up = why
        self.given_up.set()

    def _fail_all(self, death: str) -> None:
        num_output_tokens = self._output_processor.num_output_tokens()
        for request_id, consumer in list(self._consumers.items()):
            self._forget(request_id, consumer)
            self._output_processor.abort(request_id, "error")
            consumer.fail(EngineDeadError(death))
        self._choices.lose_all(num_output_tokens)
