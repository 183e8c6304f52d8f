"""What chat and plain completions have in common: collecting, streaming, counting."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from mini_infer.core.outputs import RequestDelta, RequestOutput
from mini_infer.serving.errors import raise_for_failure
from mini_infer.serving.sse import to_json

DeltaStream = AsyncGenerator[list[RequestDelta], None]


class Envelope:
    """The fields that every chunk of an answer repeats, serialised once.

    With ``include_usage`` each chunk but the last has a usage of null, as OpenAI's have.
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
        self._head = f'data: {to_json(self.fields)[:-1]},"choices":['
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"

    def event(self, choice: dict[str, Any]) -> str:
        return f"{self._head}{to_json(choice)}{self._tail}"

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
            for delta in deltas:
                raise_for_failure(delta)
                events += format_delta(delta)
                if delta.output is not None:
                    outputs.append(delta.output)
            if events:
                yield "".join(events)
    if envelope.include_usage:
        yield envelope.usage_event(usage_of(outputs))


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
