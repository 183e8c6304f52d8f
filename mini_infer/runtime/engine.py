"""The engine's loop: keep ``depth`` steps in flight, take in the oldest, hand out what is new."""

import gc
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import EngineDeadError, InvalidRequestError, MiniInferError, StepError
from mini_infer.core.events import EventStream
from mini_infer.core.outputs import RequestDelta, RequestUpdate
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.executor import Executor, StepHandle
from mini_infer.runtime.input_processor import InputProcessor, ProcessedRequest
from mini_infer.runtime.output_processor import OutputProcessor
from mini_infer.runtime.resolve import resolve_engine
from mini_infer.runtime.scheduler import Scheduler
from mini_infer.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Requests in, text deltas out. Not thread-safe: one thread adds, steps and aborts.

    ::

        add_request ─► Scheduler.schedule ─► Executor.submit ──┐  at most ``depth`` in flight
                                                               ▼
        deltas ◄─ OutputProcessor ◄─ Scheduler.update ◄─ StepHandle.result

    Depth 1 is synchronous; depth 2 schedules and launches a step before the last one's tokens are
    known, which hides the host behind the device.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        events: EventStream | None = None,
    ) -> None:
        num_blocks = executor.start()
        self.config = config = replace(config, num_kv_blocks=num_blocks)
        self.tokenizer = tokenizer
        self.events = events or EventStream()
        self._executor = executor
        self.scheduler = Scheduler(config, num_blocks, self.events)
        self.input_processor = InputProcessor(config, tokenizer)
        self._output_processor = OutputProcessor(tokenizer, self.events)
        self._in_flight: deque[tuple[ScheduledBatch, StepHandle]] = deque()
        self._pending_deltas: list[RequestDelta] = []
        self._submit_failed = False
        self._froze_heap = False

    @classmethod
    def from_options(cls, **options: Any) -> "LLMEngine":
        """Builds an engine from option names of ``EngineConfig``; what is left out is ``auto``.

        Raises:
            MiniInferError: an option, the model or its weights can't be used; the message says why.
        """
        config, executor, tokenizer = resolve_engine(options)
        engine = cls(config, executor, tokenizer)
        if not config.dry_run:
            # What stands now stays. Each full pass of the garbage collector would walk through all
            # of it, torch's hundreds of thousands of objects too, while a step waits 0.1 to 0.4 s.
            gc.collect()
            gc.freeze()
            engine._froze_heap = True
        return engine

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = True,
    ) -> None:
        """Tokenises, checks and queues a request.

        Without ``stream`` each choice has one delta, at its end.

        Raises:
            InvalidRequestError: the request can't be served as it stands, or its id is in use.
            PolicyError: a user's scheduling policy failed on it.
        """
        process = self.input_processor.process
        self.add(
            process(
                request_id,
                prompt,
                params,
                priority=priority,
                cache_salt=cache_salt,
                stream=stream,
            )
        )

    def add(self, processed: ProcessedRequest) -> None:
        """Queues a request that ``input_processor.process`` made, on whatever thread."""
        request_id = processed.request_id
        if self._output_processor.unfinished_choices(request_id) or any(
            request.request_id in self.scheduler for request in processed.requests
        ):
            raise InvalidRequestError(f"request id {request_id!r} is in use", "request_id")
        self._output_processor.add(processed)
        try:
            for request in processed.requests:
                self.scheduler.add(request)
        except MiniInferError:
            self._drop(request_id)
            raise

    def abort(self, request_id: str, *, silently: bool = False) -> None:
        """Ends a request with all its choices and frees their blocks at once.

        Its last deltas come with the next ``step``, unless ``silently``: for a caller that is gone,
        whose id may be in use again by then. An unknown or finished id is no error.
        """
        deltas = self._drop(request_id)
        if not silently:
            self._pending_deltas += deltas

    def has_unfinished(self) -> bool:
        """True while ``step`` has something to do or to hand out."""
        return bool(self._pending_deltas or self._in_flight or self.scheduler.has_unfinished())

    def step(self) -> list[RequestDelta]:
        """Launches what can run, takes in the oldest step in flight, returns what is new.

        A step that raises ends the requests that it held, with finish reason ``error``; a user's
        policy that raises, the request that it was asked about. All others go on.

        Raises:
            EngineDeadError: the device failed for good, and every further step would.
        """
        while len(self._in_flight) < self.config.depth and not self._submit_failed:
            batch = self.scheduler.schedule()
            if batch is None:
                break
            self._submit(batch)
        news = self._take_in_oldest() if self._in_flight else []
        deltas, self._pending_deltas = self._pending_deltas, []
        deltas += self._process(self.scheduler.take_failures())
        return deltas + news

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests go on."""
        self.scheduler.cache.reset_prefix_cache()

    def shutdown(self) -> None:
        """Frees the executor's memory and processes; harmless when called twice."""
        self._executor.shutdown()
        if self._froze_heap:
            self._froze_heap = False
            gc.unfreeze()

    def _submit(self, batch: ScheduledBatch) -> None:
        """Launches a step. It counts as in flight even where Ctrl-C cuts that short, as it does in
        the scheduler."""
        handle: StepHandle = _FailedStep(StepError("interrupted while it was launched"))
        try:
            handle = self._executor.submit(batch)
        except Exception as error:
            handle = _FailedStep(error)
        finally:
            # Its admissions may not have reached the device, so no step may build on it.
            self._submit_failed = isinstance(handle, _FailedStep)
            self._in_flight.append((batch, handle))

    def _take_in_oldest(self) -> list[RequestDelta]:
        batch, handle = self._in_flight[0]  # where it stays if Ctrl-C ends the wait
        try:
            result = handle.result()
        except EngineDeadError:
            raise
        except Exception as error:
            self._forget_oldest()
            logger.exception("step %d failed; its requests end with an error", batch.step_id)
            updates = self.scheduler.fail(batch, f"{type(error).__name__}: {error}")
        else:
            self._forget_oldest()
            updates = self.scheduler.update(batch, result)
        return self._process(updates)

    def _forget_oldest(self) -> None:
        self._in_flight.popleft()
        if not self._in_flight:
            self._submit_failed = False

    def _process(self, updates: Sequence[RequestUpdate]) -> list[RequestDelta]:
        if not updates:
            return []
        processed = self._output_processor.process(updates)
        for child_id, stop_string in processed.stopped:
            self.scheduler.finish(child_id, "stop", stop_string)
        return processed.deltas

    def _drop(self, request_id: str) -> list[RequestDelta]:
        for child_id in self._output_processor.unfinished_choices(request_id):
            self.scheduler.abort(child_id)
        return self._output_processor.abort(request_id)


class _FailedStep:
    """A step that raised when it was submitted; told when its turn comes."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> NoReturn:
        raise self._error
