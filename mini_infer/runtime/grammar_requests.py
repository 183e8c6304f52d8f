"""The requests that are held to grammars: until those are compiled, and while they run.

A row's next mask depends on its last token, and at depth 2 a step is submitted before the tokens of
the one before are known. Nothing is held back for it: the whole step is launched but for its
sampling, and the masks follow as soon as the step before was taken in, while the device computes
the logits that they are for. The device waits only where filling the masks takes longer than a
forward pass. (vLLM's asynchronous scheduling does the same. Leaving such rows out of every other
step would halve their speed, and splits them into two groups that take turns.)
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.errors import InvalidRequestError, MiniInferError
from mini_infer.core.request import Request
from mini_infer.core.structured_outputs import FORM_FAILED
from mini_infer.runtime.grammar import Grammar, fill_masks
from mini_infer.runtime.grammar_compiler import GrammarCompiler

if TYPE_CHECKING:
    from llguidance import LLMatcher

WAIT_SECONDS = 0.01
"""For a grammar, while there is nothing else to do."""


@dataclass(slots=True)
class _Waiting:
    """The choices of one caller's request."""

    requests: list[Request]
    future: "Future[LLMatcher]"


class GrammarRequests:
    """Belongs to an ``EngineCore`` and its thread."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        self._compiler, self._vocab_size = compiler, vocab_size
        self._waiting: list[_Waiting] = []
        self._running: dict[str, Request] = {}

    def __len__(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    def admit(self, requests: Sequence[Request]) -> bool:
        """May these choices of one caller's request enter the scheduler? Gives them grammars, or
        keeps them until they can get them.

        Raises:
            InvalidRequestError: their grammar does not compile.
        """
        asked = requests[0].params.structured_outputs
        if asked is None:
            return True
        if self._compiler is None:
            raise InvalidRequestError("this engine has no grammars", "structured_outputs")
        future = self._compiler.start(asked)
        if not future.done():
            self._waiting.append(_Waiting(list(requests), future))
            return False
        self._hold(requests, future.result())
        return True

    def drop(self, request_id: str) -> None:
        """Forgets a choice that ended, or was never queued; an unknown id is no error."""
        self._running.pop(request_id, None)
        for waiting in self._waiting:
            waiting.requests = [r for r in waiting.requests if r.request_id != request_id]

    def take_compiled(self, idle: bool) -> list[tuple[list[Request], str | None]]:
        """Requests whose grammar is there by now, or why it can't be. Waits a moment if ``idle``"""
        if not self._waiting:
            return []
        if idle:
            wait([w.future for w in self._waiting], WAIT_SECONDS, FIRST_COMPLETED)
        ready = [waiting for waiting in self._waiting if waiting.future.done()]
        self._waiting = [waiting for waiting in self._waiting if not waiting.future.done()]
        taken: list[tuple[list[Request], str | None]] = []
        for waiting in ready:
            error = None
            try:
                self._hold(waiting.requests, waiting.future.result())
            except MiniInferError as raised:
                error = FORM_FAILED + str(raised)
            taken.append((waiting.requests, error))
        return taken

    def mark(self, batch: ScheduledBatch) -> ScheduledBatch:
        """``batch``, told which of its chunks sample under a grammar."""
        if not self._running:
            return batch
        self._running = {name: r for name, r in self._running.items() if not r.finished}
        masked = tuple(
            index
            for index, chunk in enumerate(batch.chunks)
            if chunk.samples and chunk.request_id in self._running
        )
        return replace(batch, masked=masked) if masked else batch

    def masks(self, batch: ScheduledBatch) -> bytearray:
        """The masks of a batch's ``masked`` chunks, once all tokens before it are known."""
        grammars: list[Grammar | None] = []
        drafts: list[tuple[int, ...]] = []
        for index in batch.masked:
            chunk = batch.chunks[index]
            request = self._running.get(chunk.request_id)
            running = request is not None and not request.finished
            grammar = request.grammar if request is not None and running else None
            assert grammar is None or isinstance(grammar, Grammar)
            grammars.append(grammar)
            proposed = request.draft_token_ids if request is not None else ()
            known = (chunk.draft_token_ids or proposed)[: chunk.num_drafts]
            # Of one that ended in the meantime nobody knows them any more, nor has to.
            drafts.append(known or (0,) * chunk.num_drafts)
        return fill_masks(grammars, self._vocab_size, drafts if any(drafts) else ())

    def _hold(self, requests: Sequence[Request], matcher: "LLMatcher") -> None:
        assert self._compiler is not None
        for request in requests:
            request.grammar = self._compiler.grammar(matcher, request.params.ignore_eos)
            self._running[request.request_id] = request
