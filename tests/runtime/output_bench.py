"""An output processor on a bench: updates in by hand, deltas and outputs collected."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from mini_infer.core.batch import Chunk
from mini_infer.core.events import EventStream
from mini_infer.core.outputs import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestOutput,
    RequestUpdate,
    StepOutput,
    TokenLogprobs,
)
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.input_processor import ProcessedRequest
from mini_infer.runtime.output_processor import OutputProcessor
from mini_infer.runtime.step_results import apply_chunk_result

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

    def sample(self, tokens: Sequence[int], sizes: Sequence[int], request_id: str = "r") -> None:
        """Steps that sample ``tokens``, as many at a time as ``sizes`` has in turn: all but the
        last of each step are accepted drafts. Ends with the request, or as if the server did."""
        request, turns, start = self.requests[request_id], cycle(sizes), 0
        while start < len(tokens) and self.processor.unfinished_choices(request_id):
            new = tuple(tokens[start : start + next(turns)])
            start += len(new)
            num_drafts = len(new) - 1
            request.num_in_flight_tokens, request.num_in_flight_drafts = len(new), num_drafts
            out = StepOutput((new,), (tuple(_logprobs(token) for token in new),))
            chunk = Chunk(request_id, 0, request.num_tokens - 1, len(new), num_drafts=num_drafts)
            update = apply_chunk_result(request, chunk, out, 0, self.now)
            assert update is not None
            outputs = self.processor.process([update])
            self.deltas += outputs.deltas
            self.stopped += outputs.stopped
        self.deltas += self.processor.abort(request_id, "error")

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


def _logprobs(token_id: int) -> TokenLogprobs:
    """Some, of this token and its neighbour."""
    return TokenLogprobs(token_id, -token_id / 64, 2, ((token_id ^ 1, -0.5), (token_id, -1.0)))
