"""What chat and plain completions have in common: collecting, streaming, counting."""

import contextlib
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import msgspec

from mini_infer.core.errors import MiniInferError
from mini_infer.core.outputs import RequestDelta, RequestOutput
from mini_infer.serving.errors import raise_for_failure
from mini_infer.serving.sse import to_json

DeltaStream = AsyncGenerator[list[RequestDelta], None]

CHOICES = msgspec.json.Encoder()
"""A tenth of the time of Python's own encoder, for what there is a chunk of per token. It knows no
integer above 64 bits: what a caller's request is quoted in goes through ``to_json``."""


class Envelope:
    """The fields that every chunk of an answer repeats, serialised once.

    With ``include_usage`` each chunk but the last has a usage of null, as OpenAI's have, or of its
    choice so far.
    """

    def __init__(self, prefix: str, kind: str, model: str, include_usage: bool) -> None:
        self.include_usage = include_usage
        self.response_id = f"{prefix}-{uuid.uuid4().hex}"
        self.fields: dict[str, Any] = {
            "id": self.response_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self.extend({})

    def extend(self, fields: Mapping[str, Any]) -> None:
        """Adds fields for every chunk to repeat."""
        self.fields |= fields
        self._head = f'data: {to_json(self.fields)[:-1]},"choices":['

    def event(
        self, choice: dict[str, Any], usage: dict[str, Any] | None = None, **fields: Any
    ) -> str:
        """A chunk of one choice; ``fields`` stand beside its choices."""
        tail = self._tail
        if usage is not None:
            fields["usage"] = usage
        elif fields and self.include_usage:
            fields["usage"] = None
        if fields:
            tail = f"],{to_json(fields)[1:]}\n\n"
        return f"{self._head}{CHOICES.encode(choice).decode()}{tail}"

    def usage_event(self, usage: dict[str, Any]) -> str:
        return f'{self._head}],"usage":{to_json(usage)}}}\n\n'


async def collect(stream: DeltaStream) -> dict[str, RequestOutput]:
    """Waits for the outputs of all requests, by request id.

    Raises:
        MiniInferError: the engine gave one up; StepError where a step raised.
    """
    outputs: dict[str, RequestOutput] = {}
    async with contextlib.aclosing(stream):
        async for deltas in stream:
            for delta in deltas:
                raise_for_failure(delta)
                if delta.output is not None:
                    outputs[delta.request_id] = delta.output
    return outputs


async def events_of(
    stream: DeltaStream,
    format_delta: Callable[[RequestDelta], Iterable[str]],
    envelope: Envelope,
) -> AsyncGenerator[str, None]:
    """The events of a stream: one string for all deltas that were there, then the usage.

    Raises:
        MiniInferError: the engine gave a request up; StepError where a step raised.
    """
    outputs: list[RequestOutput] = []
    async with contextlib.aclosing(stream):
        async for deltas in stream:
            events: list[str] = []
            try:
                for delta in deltas:
                    raise_for_failure(delta)
                    events += format_delta(delta)
                    if delta.output is not None:
                        outputs.append(delta.output)
            except MiniInferError:
                if events:  # what came before is told, too
                    yield "".join(events)
                raise
            if events:
                yield "".join(events)
    if envelope.include_usage:
        yield envelope.usage_event(usage_of(outputs))


class UsageSoFar:
    """What ``continuous_usage_stats`` tells of each choice: its own tokens, and its prompt's."""

    def __init__(self) -> None:
        self._num_tokens: defaultdict[int, int] = defaultdict(int)

    def add(self, index: int, delta: RequestDelta) -> None:
        self._num_tokens[index] += len(delta.token_ids)

    def get(self, index: int, delta: RequestDelta) -> dict[str, Any]:
        num_tokens = self._num_tokens[index]
        return {
            "prompt_tokens": delta.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": delta.num_prompt_tokens + num_tokens,
        }


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Token counts; a prompt counts once for all its choices."""
    prompt_tokens = completion_tokens = cached_tokens = 0
    for output in outputs:
        prompt_tokens += len(output.prompt_token_ids)
        cached_tokens += output.num_cached_tokens
        completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
