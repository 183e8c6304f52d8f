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
from mini_infer.core.request import Request
from mini_infer.runtime.detokenizer import IncrementalDetokenizer, TokenTexts
from mini_infer.runtime.input_processor import ProcessedRequest
from mini_infer.runtime.logprobs import LogprobRenderer
from mini_infer.runtime.request_metrics import RequestMetricsObserver
from mini_infer.runtime.step_results import end_update
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
    request: Request
    detokenizer: IncrementalDetokenizer
    matcher: StopStringMatcher
    texts: list[str] = field(default_factory=list)
    first_token_time: float | None = None
    last_token_time: float | None = None

    def read(self, update: RequestUpdate) -> tuple[str, int]:
        """Takes in an update's tokens. Returns the text that is safe to show by now, and how many
        of them are part of the output: all but those after a stop string."""
        params = self.parent.processed.params
        token_ids = self.completion.token_ids
        new_token_ids = update.new_token_ids
        # An end-of-sequence or stop token is no part of the text; the last token of a grammar is.
        hides_last = update.finish_reason == "stop" and not params.include_stop_str_in_output
        if params.structured_outputs is not None and new_token_ids:
            hides_last = hides_last and new_token_ids[-1] in self.request.end_token_ids
        shown = new_token_ids[:-1] if hides_last else new_token_ids
        if not params.stop:
            token_ids += new_token_ids
            text = self.detokenizer.append(shown)
            if update.finish_reason is not None:
                text += self.detokenizer.flush()
            return text, len(new_token_ids)

        pieces: list[str] = []
        for count, token_id in enumerate(shown, start=1):
            token_ids.append(token_id)
            pieces.append(self._match(self.detokenizer.append((token_id,))))
            if self.matcher.matched is not None:
                return "".join(pieces), count
        token_ids += new_token_ids[len(shown) :]
        if update.finish_reason is not None:
            pieces.append(self._match(self.detokenizer.flush()))
            pieces.append(self.matcher.flush())
        return "".join(pieces), len(new_token_ids)

    def _match(self, text: str) -> str:
        armed = len(self.completion.token_ids) > self.parent.processed.params.min_tokens
        return self.matcher.append(text, armed)


class OutputProcessor:
    """Keeps the text of every running request. Call ``add`` before the scheduler's.

    With stop strings a token at a time, so that the output does not depend on how many tokens a
    step brings: a stop string ends a choice at the token that completes it, and drops what came
    after.
    """

    def __init__(self, tokenizer: Tokenizer, events: EventStream) -> None:
        self._events = events
        self._parents: dict[str, _Parent] = {}
        self._choices: dict[str, _Choice] = {}
        self._renderer = LogprobRenderer(tokenizer)
        self._metrics = RequestMetricsObserver(events)
        self._texts = {skip: TokenTexts(tokenizer, skip) for skip in (False, True)}

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
            metrics=self._metrics.add(processed.requests),
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
                request,
                IncrementalDetokenizer(
                    self._texts[params.skip_special_tokens], processed.prompt_token_ids
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
        """What a step's updates add to each choice; deltas without news are left out, and of a
        request that is not streamed, all but each choice's last.

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
            if delta is not None:
                result.deltas.append(delta)
        return result

    def abort(self, request_id: str, reason: FinishReason = "abort") -> list[RequestDelta]:
        """Ends every running choice with this ``finish_reason``; [] for an unknown request."""
        children = self.unfinished_choices(request_id)
        return self.process(
            [end_update(self._choices[child].request, reason) for child in children]
        ).deltas

    def restart(self, request_id: str) -> ProcessedRequest:
        """Forgets what a request's choices have so far, none of which was told to anybody, as they
        are computed anew. Returns the request."""
        processed = self._parents[request_id].processed
        self.add(processed)
        return processed

    def num_output_tokens(self) -> dict[str, int]:
        """Of every choice that runs, how many tokens it has so far."""
        return {child: len(item.completion.token_ids) for child, item in self._choices.items()}

    def _advance(self, choice: _Choice, update: RequestUpdate) -> RequestDelta | None:
        parent, completion, matcher = choice.parent, choice.completion, choice.matcher
        text, num_new_tokens = choice.read(update)
        choice.texts.append(text)
        if update.time is not None:
            choice.last_token_time = update.time
            if choice.first_token_time is None:
                choice.first_token_time = update.time
        token_ids = update.new_token_ids[:num_new_tokens]
        finish_reason, stop_reason = update.finish_reason, update.stop_reason
        if matcher.matched is not None:
            finish_reason, stop_reason = "stop", matcher.matched
        logprobs: tuple[dict[int, Logprob], ...] = ()
        if update.new_logprobs:
            logprobs = self._logprobs(choice, update.new_logprobs[:num_new_tokens])
        prompt_logprobs = None
        if update.prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs(parent, update.prompt_logprobs)
        if completion.index == 0 and update.num_cached_tokens > parent.output.num_cached_tokens:
            parent.output.num_cached_tokens = update.num_cached_tokens
        output = None
        if finish_reason is not None:
            output = self._finish(update.request_id, choice, finish_reason, stop_reason)
        if not parent.processed.stream:
            if finish_reason is None:
                return None
            text, token_ids = completion.text, tuple(completion.token_ids)
            logprobs = tuple(completion.logprobs or ())
            is_first = parent.num_unfinished == len(parent.processed.requests) - 1
            prompt_logprobs = parent.output.prompt_logprobs if is_first else None
        elif not (text or token_ids or finish_reason or prompt_logprobs):
            return None
        return RequestDelta(
            request_id=parent.processed.request_id,
            index=completion.index,
            text=text,
            token_ids=token_ids,
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
        self._metrics.end(child_id, choice.first_token_time, choice.last_token_time)
        self._events.emit(Answered(self._events.now(), child_id, finish_reason))
        parent = choice.parent
        parent.num_unfinished -= 1
        if parent.num_unfinished:
            return None
        del self._parents[parent.processed.request_id]
        parent.output.finished = True
        return parent.output

    def _logprobs(
        self, choice: _Choice, positions: Sequence[TokenLogprobs]
    ) -> tuple[dict[int, Logprob], ...]:
        completion, num_top = choice.completion, choice.parent.processed.params.logprobs
        if completion.logprobs is None or num_top is None:
            return ()
        shown = tuple(self._renderer.render(position, num_top) for position in positions)
        completion.logprobs.extend(shown)
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + sum(
            position.logprob for position in positions
        )
        return shown

    def _prompt_logprobs(
        self, parent: _Parent, positions: Sequence[TokenLogprobs | None]
    ) -> list[dict[int, Logprob] | None] | None:
        """Shown once a request, with whichever choice brings them first."""
        num_top = parent.processed.params.prompt_logprobs
        if num_top is None or parent.output.prompt_logprobs is not None:
            return None
        parent.output.prompt_logprobs = [
            None if position is None else self._renderer.render(position, num_top)
            for position in positions
        ]
        return parent.output.prompt_logprobs
