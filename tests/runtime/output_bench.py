"""An output processor on a bench: updates in by hand, deltas and outputs collected."""

from collections.abc import Sequence
from typing import Any

from mini_infer.core.events import EventStream
from mini_infer.core.outputs import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestOutput,
    RequestUpdate,
)
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.input_processor import ProcessedRequest
from mini_infer.runtime.output_processor import OutputProcessor

TOKENIZER = ByteTokenizer()
EOS = 257
PROMPT = list(b"ask")


class Bench:
    """An output processor, a clock set by hand, and what came out so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = EventStream(clock=lambda: self.now)
        self.processor = OutputProcessor(TOKENIZER, self.events)
        self.deltas: list[RequestDelta] = []
        self.stopped: list[tuple[str, str]] = []
        self.requests: dict[str, Request] = {}

    def add(
        self,
        request_id: str = "r",
        prompt: str | None = "ask",
        stream: bool = True,
        **params: Any,
    ) -> list[str]:
        sampling = SamplingParams(**{"max_tokens": 100, **params})
        ids = [request_id]
        if sampling.n > 1:
            ids = [f"{request_id}#{index}" for index in range(sampling.n)]
        requests = [Request(item, PROMPT, sampling, seed=0, max_tokens=100) for item in ids]
        self.requests |= zip(ids, requests, strict=True)
        self.processor.add(ProcessedRequest(request_id, prompt, PROMPT, sampling, requests, stream))
        return ids

    def update(
        self,
        tokens: str | Sequence[int],
        finish: FinishReason | None = None,
        request_id: str = "r",
        **fields: Any,
    ) -> list[RequestDelta]:
        ids = tuple(tokens.encode()) if isinstance(tokens, str) else tuple(tokens)
        outputs = self.processor.process(
            [RequestUpdate(request_id, ids, finish_reason=finish, **fields)]
        )
        self.deltas += outputs.deltas
        self.stopped += outputs.stopped
        return outputs.deltas

    @property
    def texts(self) -> list[str]:
        return [delta.text for delta in self.deltas]

    @property
    def output(self) -> RequestOutput:
        output = self.deltas[-1].output
        assert output is not None
        return output

    @property
    def choice(self) -> CompletionOutput:
        return self.output.outputs[0]

    def assert_empty(self) -> None:
        assert self.processor.num_unfinished == 0
        assert not self.processor._choices
        assert not self.processor._parents
        assert not self.processor._metrics._choices
