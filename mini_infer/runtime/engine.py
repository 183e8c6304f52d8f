"""``LLMEngine``: an engine in this process, from prompts to text."""

from collections.abc import Sequence
from typing import Any

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidRequestError, MiniInferError
from mini_infer.core.events import EventStream
from mini_infer.core.outputs import RequestDelta, RequestUpdate
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.executor import Executor
from mini_infer.runtime.grammar_compiler import GrammarCompiler
from mini_infer.runtime.input_processor import InputProcessor, ProcessedRequest
from mini_infer.runtime.output_processor import OutputProcessor
from mini_infer.runtime.resolve import resolve_engine
from mini_infer.runtime.scheduler import Scheduler
from mini_infer.runtime.tokenizer import Tokenizer


class LLMEngine:
    """Requests in, text deltas out. Not thread-safe: one thread adds, steps and aborts.

    ::

        prompt ─► InputProcessor ─► EngineCore: scheduler, executor ─► OutputProcessor ─► deltas

    A server has the same three parts, with ``EngineCore`` in another process (``AsyncEngine``).
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        events: EventStream | None = None,
    ) -> None:
        grammars = GrammarCompiler(config, tokenizer)
        self.core = EngineCore(config, executor, events, grammars)
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(self.config, tokenizer, grammars)
        self._output_processor = OutputProcessor(tokenizer, self.events)
        self._pending_deltas: list[RequestDelta] = []

    @classmethod
    def from_options(cls, **options: Any) -> "LLMEngine":
        """Builds an engine from option names of ``EngineConfig``; what is left out is ``auto``.

        Raises:
            MiniInferError: an option, the model or its weights can't be used; the message says why.
        """
        config, executor, tokenizer = resolve_engine(options)
        engine = cls(config, executor, tokenizer)
        if not config.dry_run:
            engine.core.freeze_heap()
        return engine

    @property
    def config(self) -> EngineConfig:
        return self.core.config

    @property
    def events(self) -> EventStream:
        return self.core.events

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

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
            self.core.add(processed.requests)
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
        return bool(self._pending_deltas) or self.core.has_unfinished()

    def step(self) -> list[RequestDelta]:
        """Runs one step of the core and returns what is new, as text.

        Raises:
            EngineDeadError: the device failed for good, and every further step would.
        """
        updates = self.core.step()
        deltas, self._pending_deltas = self._pending_deltas, []
        return deltas + self._process(updates)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests go on."""
        self.core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Frees the executor's memory and processes; harmless when called twice."""
        self.core.shutdown()

    def _process(self, updates: Sequence[RequestUpdate]) -> list[RequestDelta]:
        if not updates:
            return []
        processed = self._output_processor.process(updates)
        for child_id, stop_string in processed.stopped:
            self.core.finish(child_id, "stop", stop_string)
        return processed.deltas

    def _drop(self, request_id: str) -> list[RequestDelta]:
        choices = self._output_processor.unfinished_choices(request_id)
        for child_id in choices:
            self.core.finish(child_id, "abort")
        return self._output_processor.abort(request_id) if choices else []
