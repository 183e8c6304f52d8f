"""The engine's loop on token ids: keep ``depth`` steps in flight, take in the oldest.

It knows no text, so that it can run in a process of its own (``engine_main.py``) while another one
tokenizes, detokenizes and speaks HTTP.
"""

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import EngineDeadError, MiniInferError, StepError
from mini_infer.core.events import EventStream
from mini_infer.core.outputs import FinishReason, RequestUpdate
from mini_infer.core.request import Request
from mini_infer.runtime.executor import Executor, MaskedStepHandle, StepHandle
from mini_infer.runtime.grammar_compiler import GrammarCompiler
from mini_infer.runtime.grammar_requests import GrammarRequests
from mini_infer.runtime.scheduler import Scheduler
from mini_infer.runtime.step_results import end_update
from mini_infer.runtime.step_trials import StepTrials

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests in, updates of token ids out. Not thread-safe: one thread adds, steps and ends.

    ::

        add ─► Scheduler.schedule ─► Executor.submit ──┐  at most ``depth`` in flight
                                                       ▼
        updates ◄──────── Scheduler.update ◄── StepHandle.result

    Depth 1 is synchronous; depth 2 schedules and launches a step before the last one's tokens are
    known, which hides the host behind the device. In a pipeline each stage has a step of its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        events: EventStream | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Starts the executor, which loads the model. Without ``grammars`` it takes no requests
        with structured outputs."""
        num_blocks = executor.start()
        self.config = config = replace(config, num_kv_blocks=num_blocks)
        self.events = events or EventStream()
        self.executor = executor
        costs = executor.step_costs() if config.speculative_config else None
        self.scheduler = Scheduler(config, num_blocks, self.events, costs=costs)
        self._in_flight: deque[tuple[ScheduledBatch, StepHandle]] = deque()
        self._launching: ScheduledBatch | None = None
        self._submit_failed = False
        self._trials = StepTrials()
        self._grammars = GrammarRequests(grammars, config.model_config.vocab_size)
        self._unsampled: MaskedStepHandle | None = None
        """The last step in flight, while it waits for its masks."""
        self._froze_heap = False

    def freeze_heap(self) -> None:
        """Takes what stands now out of the garbage collector's sight, until ``shutdown``. Each full
        pass would walk through all of it, torch's hundreds of thousands of objects too, while a
        step waits 0.1 to 0.4 s."""
        gc.collect()
        gc.freeze()
        self._froze_heap = True

    def add(self, requests: Sequence[Request]) -> None:
        """Queues the choices of one caller's request, all or none; their ids are not in use.

        Those with a grammar that is yet to be compiled are queued once it is.

        Raises:
            InvalidRequestError: one could not finish even alone in the KV pool, or has no grammar.
            PolicyError: a user's scheduling policy failed on it.
        """
        if self._grammars.admit(requests):
            self._schedule(requests)

    def _schedule(self, requests: Sequence[Request]) -> None:
        try:
            for request in requests:
                self.scheduler.add(request)
        except MiniInferError:
            for request in requests:
                self.finish(request.request_id, "abort")
            raise

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Ends a choice from outside and frees its blocks at once: a stop string in its text, or an
        abort. There is no update of it then. An unknown or finished id is no error."""
        self._grammars.drop(request_id)
        self.scheduler.finish(request_id, reason, stop_reason)

    def has_unfinished(self) -> bool:
        """True while ``step`` has something to do."""
        return bool(self._in_flight or self.scheduler.has_unfinished() or self._grammars)

    @property
    def under_way(self) -> list[ScheduledBatch]:
        """The steps in flight, and one that is being launched. On whatever thread."""
        launching = self._launching
        batches = [batch for batch, _ in tuple(self._in_flight)]
        return batches if launching is None else [*batches, launching]

    def step(self) -> list[RequestUpdate]:
        """Launches what can run, takes in the oldest step in flight, returns what is new.

        A request that makes the model raise ends with finish reason ``error`` (``StepTrials``), as
        does one on which a user's policy raises. All others go on.

        Raises:
            EngineDeadError: the device failed for good, and every further step would.
        """
        refused = self._schedule_compiled()
        while (
            len(self._in_flight) < self.config.depth
            and not self._submit_failed
            and self._unsampled is None
        ):
            batch = self._next_batch()
            if batch is None:
                break
            self._submit(self._grammars.mark(batch))
            self._sample_if_known()
        news = self._take_in_oldest() if self._in_flight else []
        self._sample_if_known()
        return refused + self.scheduler.take_failures() + news

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests go on."""
        self.scheduler.cache.reset_prefix_cache()

    def shutdown(self) -> None:
        """Frees the executor's memory and processes; harmless when called twice."""
        self.executor.shutdown()
        if self._froze_heap:
            self._froze_heap = False
            gc.unfreeze()

    def _next_batch(self) -> ScheduledBatch | None:
        if self._trials.under_way and self._in_flight:
            return None  # one by one, so that it is clear which step raised
        suspects = self._trials.next_group()
        if not suspects:
            return self.scheduler.schedule()
        batch = self.scheduler.schedule_only(suspects)
        if batch is None:
            self._trials.give_up()
            batch = self.scheduler.schedule()
        return batch

    def _submit(self, batch: ScheduledBatch) -> None:
        """Launches a step. It counts as in flight even where Ctrl-C cuts that short, as it does in
        the scheduler."""
        handle: StepHandle = _FailedStep(_InterruptedError("while it was launched"))
        self._launching = batch
        try:
            handle = self.executor.submit(batch)
        except Exception as error:
            handle = _FailedStep(error)
        finally:
            # Its admissions may not have reached the device, so no step may build on it.
            self._submit_failed = isinstance(handle, _FailedStep)
            self._in_flight.append((batch, handle))
            self._launching = None
            if batch.masked and isinstance(handle, MaskedStepHandle):
                self._unsampled = handle

    def _schedule_compiled(self) -> list[RequestUpdate]:
        """Queues requests whose grammar is there by now; the updates of those that get none."""
        refused: list[RequestUpdate] = []
        idle = not (self._in_flight or self.scheduler.has_unfinished())
        for requests, error in self._grammars.take_compiled(idle):
            try:
                if error is None:
                    self._schedule(requests)
            except MiniInferError as raised:
                error = str(raised)
            if error is not None:
                refused += [end_update(request, "error", error) for request in requests]
        return refused

    def _sample_if_known(self) -> None:
        """Lets the step that waits for its masks sample, once all tokens before it are known: in a
        pipeline they are, as ``Turns`` plans no request with a grammar before its token is."""
        if self._unsampled is None or (len(self._in_flight) > 1 and not self.config.is_pipelined):
            return
        handle, self._unsampled = self._unsampled, None
        batch, _ = self._in_flight[-1]
        failed: Exception | None = _InterruptedError("while it sampled")
        try:
            handle.sample(self._grammars.masks(batch))
            failed = None
        except Exception as error:
            failed = error
        finally:
            if failed is not None:
                self._submit_failed = True
                self._in_flight[-1] = batch, _FailedStep(failed)

    def _take_in_oldest(self) -> list[RequestUpdate]:
        batch, handle = self._in_flight[0]  # where it stays if Ctrl-C ends the wait
        try:
            result = handle.result()
        except EngineDeadError:
            raise
        except Exception as error:
            if not self._trials.under_way:  # else it is known already
                logger.exception("step %d failed; it held %d", batch.step_id, len(batch.chunks))
            return self._take_back(batch, error)
        self._in_flight.popleft()
        self._trials.succeed()
        return self.scheduler.update(batch, result)

    def _take_back(self, failed: ScheduledBatch, error: Exception) -> list[RequestUpdate]:
        """Undoes all steps in flight, of which the oldest failed; ends who is guilty of it."""
        later = list(self._in_flight)[1:]
        self._in_flight.clear()
        self._submit_failed = False
        unsampled, self._unsampled = self._unsampled, None
        requests = self.scheduler.retract()
        for _, handle in later:
            if handle is not unsampled:
                with contextlib.suppress(Exception):
                    handle.result()
        if isinstance(error, _InterruptedError):
            return []
        guilty = self._trials.fail(failed, requests)
        message = f"{type(error).__name__}: {error}"
        for request in guilty:
            logger.error("request %s ends with an error: %s", request.request_id, message)
            self.scheduler.finish(request.request_id, "error", message)
        return [end_update(request, "error", message) for request in guilty]


class _InterruptedError(StepError):
    """Ctrl-C cut the launch of a step short: no request's fault."""


class _FailedStep:
    """A step that raised when it was submitted; told when its turn comes."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> NoReturn:
        raise self._error
