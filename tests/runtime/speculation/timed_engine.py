"""A whole engine, scheduler and all, on a device that only keeps time: made-up step costs, a host
that takes its time between a result and the next launch, and requests that are told what to answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.core.events import EventStream
from mini_infer.core.outputs import StepOutput
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.engine_core import EngineCore
from tests.runtime.fake_executor import make_config


@dataclass(slots=True)
class _Step:
    device: "TimedDevice"
    end: float
    out: StepOutput

    def result(self) -> StepOutput:
        self.device.now = max(self.device.now, self.end + self.device.latency)
        return self.out


class TimedDevice:
    """An executor whose steps take what ``costs`` say, on a clock that only moves as it is told.

    A step that is launched while another runs begins when that ends. The host takes ``host``
    seconds for each step, and a result is known ``latency`` after its step: both are hidden behind
    a step in flight, and are a gap before a step that can't be launched earlier.
    """

    def __init__(
        self,
        costs: StepCosts,
        told: StepCosts | None = None,
        host: float = 0.0,
        latency: float = 0.0,
    ) -> None:
        """``told`` is what the engine is told that they are."""
        self.costs, self.told = costs, told or costs
        self.host, self.latency = host, latency
        self.now = 0.0
        self.texts: dict[str, Sequence[int]] = {}
        """Of each request, prompt and answer."""
        self._lengths: dict[str, int] = {}
        self.num_steps = self.num_drafts = self.num_verifications = 0
        self._free_at = 0.0

    def start(self) -> int:
        return 4096

    def step_costs(self) -> StepCosts:
        return self.told

    def shutdown(self) -> None:
        pass

    def submit(self, batch: ScheduledBatch) -> _Step:
        self.now += self.host
        most = max(chunk.num_drafts for chunk in batch.chunks)
        seconds = self.costs.verify_seconds(len(batch.chunks), most)
        self._free_at = max(self.now, self._free_at) + seconds
        self.num_steps += 1
        self.num_drafts += sum(chunk.num_drafts for chunk in batch.chunks)
        self.num_verifications += sum(chunk.num_drafts > 0 for chunk in batch.chunks)
        return _Step(self, self._free_at, StepOutput(tuple(map(self._sampled, batch.chunks))))

    def _sampled(self, chunk: Chunk) -> tuple[int, ...]:
        if not chunk.samples:
            return ()
        text = self.texts[chunk.request_id]
        planned = chunk.num_computed_tokens + chunk.num_new_tokens - chunk.num_drafts
        start = planned if chunk.start_known else self._lengths[chunk.request_id]
        right = 0
        if start == planned:  # else what stands there is another step's, and wrong
            while right < chunk.num_drafts and text[start + right] == chunk.draft_token_ids[right]:
                right += 1
        self._lengths[chunk.request_id] = start + right + 1
        return tuple(text[start : start + right + 1])


class TimedEngine:
    """One engine and its device."""

    def __init__(
        self, device: TimedDevice, speculation: SpeculativeConfig | None, **options: object
    ) -> None:
        defaults = {"max_model_len": 8192, "num_kv_blocks": 4096, "depth": 2, "block_size": 16}
        config = make_config(speculative_config=speculation, **(defaults | options))
        self.device = device
        self.core = EngineCore(config, device, EventStream(lambda: device.now))
        self._num_requests = 0

    def answer(self, *texts: tuple[Sequence[int], Sequence[int]]) -> float:
        """Gives each prompt its answer, all at once; the seconds from the first token of any on."""
        requests = []
        for prompt, answer in texts:
            name, self._num_requests = str(self._num_requests), self._num_requests + 1
            self.device.texts[name] = [
                *prompt,
                *answer,
                *answer[-1:],
            ]  # one behind: a step too many
            params = SamplingParams(max_tokens=len(answer))
            requests.append(Request(name, list(prompt), params, seed=0, max_tokens=len(answer)))
        self.core.add(requests)
        while self.core.has_unfinished():
            self.core.step()
        for request, (_, answer) in zip(requests, texts, strict=True):
            assert request.output_token_ids == list(answer)
        begin = min(request.first_token_time or 0.0 for request in requests)
        return max(request.last_token_time or 0.0 for request in requests) - begin
