"""POST /v1/completions: a batch of prompts, echo, and OpenAI's older shape of log-probabilities."""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mini_infer.core.outputs import Logprob, RequestDelta, RequestOutput
from mini_infer.serving.answer import DeltaStream, Envelope, UsageSoFar, usage_of
from mini_infer.serving.logprobs import CompletionLogprobs, joined, no_logprobs, prompt_logprobs
from mini_infer.serving.schema import CompletionRequest
from mini_infer.serving.text_offsets import PromptText

if TYPE_CHECKING:
    from mini_infer.runtime.tokenizer import Tokenizer


class CompletionFormat:
    """Formats the deltas or outputs of a batch. Choice ``i`` of prompt ``p`` has index
    ``p * n + i``."""

    def __init__(
        self,
        envelope: Envelope,
        body: CompletionRequest,
        tokenizer: "Tokenizer",
        prompts: Mapping[str, str | Sequence[int]],
    ) -> None:
        envelope.extend(body.answer_fields)
        self._envelope = envelope
        self._body = body
        self._usage = UsageSoFar() if body.continuous_usage else None
        skip = body.skip_special_tokens is not False
        self._prompts = {
            request_id: PromptText(tokenizer, prompt, skip, body.add_special_tokens is not False)
            for request_id, prompt in prompts.items()
        }
        self._rows = {request_id: row for row, request_id in enumerate(prompts)}
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._started: set[int] = set()
        """Indices of choices whose first piece, with the echo, was formatted."""
        self._prompt_logprobs: dict[str, list[dict[int, Logprob] | None] | None] = {}

    def chunks(self, delta: RequestDelta) -> Iterator[str]:
        """The chunks of a streamed answer that one delta becomes."""
        index = self._index(delta.request_id, delta.index)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[delta.request_id] = delta.prompt_logprobs
        first = index not in self._started
        returns_token_ids = self._body.return_token_ids
        tells_prompt = (
            self._body.echo or self._body.prompt_logprobs is not None or returns_token_ids
        )
        tells_tokens = delta.text or delta.logprobs or (returns_token_ids and delta.token_ids)
        if self._usage is not None:
            self._usage.add(index, delta)
        if tells_tokens or (first and tells_prompt):
            text, logprobs = self._piece(delta.request_id, index, delta.text, delta.logprobs)
            fields: dict[str, Any] = {}
            if first and self._body.prompt_logprobs is not None:
                fields["prompt_logprobs"] = prompt_logprobs(
                    self._prompt_logprobs.get(delta.request_id)
                )
            if returns_token_ids:
                fields["token_ids"] = delta.token_ids
                if first:
                    prompt = self._prompts[delta.request_id]
                    fields["prompt_token_ids"] = prompt.token_ids[-delta.num_prompt_tokens :]
            yield self._event(delta, _choice(index, text, logprobs, **fields))
        if delta.finish_reason is not None:
            reasons = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield self._event(delta, _choice(index, "", None, **reasons))

    def answer(self, outputs: Mapping[str, RequestOutput]) -> dict[str, Any]:
        """The whole answer of a request that isn't streamed."""
        choices = []
        for request_id in self._prompts:
            output = outputs[request_id]
            self._prompt_logprobs[request_id] = output.prompt_logprobs
            fields: dict[str, Any] = {}
            if self._body.prompt_logprobs is not None:
                fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
            for choice in output.outputs:
                index = self._index(request_id, choice.index)
                text, logprobs = self._piece(request_id, index, choice.text, choice.logprobs or ())
                fields |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
                if self._body.return_token_ids:
                    fields |= {
                        "token_ids": choice.token_ids,
                        "prompt_token_ids": output.prompt_token_ids,
                    }
                choices.append(_choice(index, text, logprobs, **fields))
        return {
            **self._envelope.fields,
            "choices": choices,
            "usage": usage_of(outputs.values()),
        }

    def _event(self, delta: RequestDelta, choice: dict[str, Any]) -> str:
        usage = None if self._usage is None else self._usage.get(choice["index"], delta)
        return self._envelope.event(choice, usage)

    def _index(self, request_id: str, choice: int) -> int:
        return self._rows[request_id] * (self._body.n or 1) + choice

    def _piece(
        self,
        request_id: str,
        index: int,
        text: str,
        logprobs: Sequence[dict[int, Logprob]],
    ) -> tuple[str, dict[str, Any] | None]:
        """New text and log-probabilities of a choice, its first ones after the echoed prompt."""
        first = index not in self._started
        self._started.add(index)
        prompt = self._prompts[request_id]
        if first and self._body.echo:
            text = prompt.text + text
        num_top = self._body.logprobs
        if num_top is None:
            return text, None
        before = no_logprobs()
        if first:
            self._logprobs[index] = CompletionLogprobs(prompt, self._body.echo)
            positions = self._prompt_logprobs.get(request_id)
            if self._body.echo and positions:
                before = self._logprobs[index].echo(positions, num_top)
        return text, joined(before, self._logprobs[index].add(logprobs, num_top))


async def without_output(stream: DeltaStream) -> AsyncGenerator[list[RequestDelta], None]:
    """The deltas of requests that had to generate a token for an echo alone."""
    async with contextlib.aclosing(stream):
        async for deltas in stream:
            for delta in deltas:
                delta.text, delta.token_ids, delta.logprobs = "", (), ()
                if delta.finish_reason == "stop":
                    delta.finish_reason, delta.stop_reason = "length", None
                for choice in delta.output.outputs if delta.output else ():
                    choice.text, choice.token_ids = "", []
                    choice.logprobs = None if choice.logprobs is None else []
                    choice.finish_reason, choice.stop_reason = "length", None
            yield deltas


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, **fields: Any
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **fields}
