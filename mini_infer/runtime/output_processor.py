"""From the scheduler's token ids to text: deltas and finished outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_infer.core.events import Answered, EventStream
from mini_infer.core.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestDelta,
    RequestOutput,
    RequestUpdate,
    TokenLogprobs,
)
from mini_infer.runtime.detokenizer import IncrementalDetokenizer
from mini_infer.runtime.input_processor import ProcessedRequest
from mini_infer.runtime.logprobs import LogprobRenderer
from mini_infer.runtime.request_metrics import RequestMetricsObserver
from mini_infer.runtime.stop_strings import StopStringMatcher
from mini_infer.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """A step's news. The engine must end the requests in ``stopped``: ``(request_id, string)``
    of each whose text met a stop string, which the scheduler can't see."""

    deltas: list[RequestDelta]
    stopped: list[tuple[str, str]]


@dataclass(slots=True)
class _Parent:
    """A caller's request: what its choices share, and the output they add up to."""

    processed: ProcessedRequest
    output: RequestOutput
    num_unfinished: int


@dataclass(slots=True)
class _Choice:
    """One choice while it runs."""

    parent: _Parent
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer
    matcher: StopStringMatcher
    texts: list[str] = field(default_factory=list)


class OutputProcessor:
    """Keeps the text of every running request. Call ``add`` before the scheduler's.

    A token at a time, so that the output does not depend on how many tokens a step brings: a stop
    string ends a choice at the token that completes it, and drops what came after.
    """

    def __init__(self, tokenizer: Tokenizer, events: EventStream) -> None:
        self._tokenizer = tokenizer
        self._events = events
        self._parents: dict[str, _Parent] = {}
        self._choices: dict[str, _Choice] = {}
        self._renderer = LogprobRenderer(tokenizer)
        self._metrics = RequestMetricsObserver(events)

    @property
    def num_unfinished(self) -> int:
        """Callers' requests that still run."""
        return len(self._parents)

    def add(self, processed: ProcessedRequest) -> None:
        """Starts to follow a request whose choices are about to enter the scheduler."""
        params = processed.params
        output = RequestOutput(
            request_id=processed.request_id,
            prompt=processed.prompt,
            prompt_token_ids=processed.prompt_token_ids,
            outputs=[CompletionOutput(index) for index in range(params.n)],
            metrics=self._metrics.add([request.request_id for request in processed.requests]),
            finished=False,
        )
        parent = _Parent(processed, output, params.n)
        self._parents[processed.request_id] = parent
        for request, completion in zip(processed.requests, output.outputs, strict=True):
            if params.logprobs is not None:
                completion.logprobs = []
                completion.cumulative_logprob = 0.0
            self._choices[request.request_id] = _Choice(
                parent,
                completion,
                IncrementalDetokenizer(
                    self._tokenizer, processed.prompt_token_ids, params.skip_special_tokens
                ),
                StopStringMatcher(params.stop, params.include_stop_str_in_output),
            )

    def unfinished_choices(self, request_id: str) -> list[str]:
        """Ids of a caller's request's choices that still run; [] for an unknown request."""
        if request_id not in self._parents:
            return []
        requests = self._parents[request_id].processed.requests
        return [item.request_id for item in requests if item.request_id in self._choices]

    def process(self, updates: Sequence[RequestUpdate]) -> ProcessedOutputs:
        """What a step's updates add to each choice; deltas without news are left out.

        Updates of a choice that has ended already (a step was in flight when its stop string
        appeared) are ignored.
        """
        result = ProcessedOutputs([], [])
        for update in updates:
            choice = self._choices.get(update.request_id)
            if choice is None:
                continue
            delta = self._advance(choice, update)
            if choice.matcher.matched is not None and update.finish_reason is None:
                result.stopped.append((update.request_id, choice.matcher.matched))
            if delta.text or delta.token_ids or delta.finish_reason or delta.prompt_logprobs:
                result.deltas.append(delta)
        return result

    def abort(self, request_id: str) -> list[RequestDelta]:
        """Ends every running choice with ``finish_reason`` "abort"; [] for an unknown request."""
        updates = [
            RequestUpdate(child, (), finish_reason="abort")
            for child in self.unfinished_choices(request_id)
        ]
        return self.process(updates).deltas

    def _advance(self, choice: _Choice, update: RequestUpdate) -> RequestDelta:
        parent, completion, matcher = choice.parent, choice.completion, choice.matcher
        params = parent.processed.params
        pieces = []
        num_new_tokens = 0
        for position, token_id in enumerate(update.new_token_ids, start=1):
            num_new_tokens = position
            completion.token_ids.append(token_id)
            ends = update.finish_reason == "stop" and position == len(update.new_token_ids)
            if ends and not params.include_stop_str_in_output:
                break  # an end-of-sequence or stop token is no part of the text
            armed = len(completion.token_ids) > params.min_tokens
            pieces.append(matcher.append(choice.detokenizer.append((token_id,)), armed))
            if matcher.matched is not None:
                break

        finish_reason, stop_reason = update.finish_reason, update.stop_reason
        if finish_reason is not None and matcher.matched is None:
            armed = len(completion.token_ids) > params.min_tokens
            pieces.append(matcher.append(choice.detokenizer.flush(), armed))
            pieces.append(matcher.flush())
        if matcher.matched is not None:
            finish_reason, stop_reason = "stop", matcher.matched

        logprobs = self._logprobs(completion, update.new_logprobs[:num_new_tokens], params.logprobs)
        text = "".join(pieces)
        choice.texts.append(text)
        prompt_logprobs = self._prompt_logprobs(parent, update)
        if completion.index == 0:
            parent.output.num_cached_tokens = max(
                parent.output.num_cached_tokens, update.num_cached_tokens
            )
        output = None
        if finish_reason is not None:
            output = self._finish(update.request_id, choice, finish_reason, stop_reason)
        return RequestDelta(
            request_id=parent.processed.request_id,
            index=completion.index,
            text=text,
            token_ids=update.new_token_ids[:num_new_tokens],
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(parent.processed.prompt_token_ids),
            num_cached_tokens=update.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            output=output,
        )

    def _finish(
        self,
        child_id: str,
        choice: _Choice,
        finish_reason: FinishReason,
        stop_reason: int | str | None,
    ) -> RequestOutput | None:
        """Completes a choice, forgets it, and returns the whole output with the last one."""
        choice.completion.text = "".join(choice.texts)
        choice.completion.finish_reason = finish_reason
        choice.completion.stop_reason = stop_reason
        del self._choices[child_id]
        self._metrics.end(child_id)
        self._events.emit(Answered(self._events.now(), child_id, finish_reason))
        parent = choice.parent
        parent.num_unfinished -= 1
        if parent.num_unfinished:
            return None
        del self._parents[parent.processed.request_id]
        parent.output.finished = True
        return parent.output

    def _logprobs(
        self,
        completion: CompletionOutput,
        positions: Sequence[TokenLogprobs],
        num_top: int | None,
    ) -> tuple[dict[int, Logprob], ...]:
        if completion.logprobs is None or num_top is None:
            return ()
        shown = tuple(self._renderer.render(position, num_top) for position in positions)
        completion.logprobs.extend(shown)
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + sum(
            position.logprob for position in positions
        )
        return shown

    def _prompt_logprobs(
        self, parent: _Parent, update: RequestUpdate
    ) -> list[dict[int, Logprob] | None] | None:
        """Shown once a request, with whichever choice brings them first."""
        num_top = parent.processed.params.prompt_logprobs
        if (
            update.prompt_logprobs is None
            or num_top is None
            or parent.output.prompt_logprobs is not None
        ):
            return None
        parent.output.prompt_logprobs = [
            None if position is None else self._renderer.render(position, num_top)
            for position in update.prompt_logprobs
        ]
        return parent.output.prompt_logprobs
