"""A whole engine, scheduler and all, on a device that only keeps time: made-up step costs, a host
that takes its time between a result and the next launch, and requests that are told what to answer.
"""

import random
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
        draft_host: float = 0.0,
        acceptance: float = 0.0,
    ) -> None:
        """``told`` is what the engine is told that they are. The host takes ``draft_host`` seconds
        more for each request that has drafts. Those that the device itself proposes are right with
        the likelihood of ``acceptance``, each by a die of its own."""
        self.costs, self.told = costs, told or costs
        self.draft_host, self.acceptance = draft_host, acceptance
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
        num_verifications = sum(chunk.num_drafts > 0 for chunk in batch.chunks)
        self.now += self.host + self.draft_host * num_verifications
        most = max(chunk.num_drafts for chunk in batch.chunks)
        proposed = max(chunk.num_proposed for chunk in batch.chunks)
        seconds = self.costs.verify_seconds(len(batch.chunks), most)
        seconds += self.costs.propose_seconds(len(batch.chunks), proposed)
        self._free_at = max(self.now, self._free_at) + seconds
        self.num_steps += 1
        self.num_drafts += sum(chunk.num_drafts for chunk in batch.chunks)
        self.num_verifications += num_verifications
        return _Step(self, self._free_at, StepOutput(tuple(map(self._sampled, batch.chunks))))

    def _sampled(self, chunk: Chunk) -> tuple[int, ...]:
        if not chunk.samples:
            return ()
        text = self.texts[chunk.request_id]
        planned = chunk.num_computed_tokens + chunk.num_new_tokens - chunk.num_drafts
        start = planned if chunk.start_known else self._lengths[chunk.request_id]
        right = 0
        if not chunk.draft_token_ids:  # the device's own, which stand where it knows
            while right < chunk.num_drafts and self._is_right(chunk, start + right):
                right += 1
        elif start == planned:  # else what stands there is another step's, and wrong
            while right < chunk.num_drafts and text[start + right] == chunk.draft_token_ids[right]:
                right += 1
        self._lengths[chunk.request_id] = start + right + 1
        return tuple(text[start : start + right + 1])

    def _is_right(self, chunk: Chunk, place: int) -> bool:
        return random.Random(f"{chunk.request_id}, {place}").random() < self.acceptance


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
        times = self.times(*texts)
        begin = min(begin for begin, _ in times)
        return max(end for _, end in times) - begin

    def times(self, *texts: tuple[Sequence[int], Sequence[int]]) -> list[tuple[float, float]]:
        """Likewise; when the first and the last token of each was there."""
        requests = []
        for prompt, answer in texts:
            name, self._num_requests = str(self._num_requests), self._num_requests + 1
            behind = answer[-1:] * 17  # steps too many, and drafts of theirs
            self.device.texts[name] = [*prompt, *answer, *behind]
            params = SamplingParams(max_tokens=len(answer))
            requests.append(Request(name, list(prompt), params, seed=0, max_tokens=len(answer)))
        self.core.add(requests)
        while self.core.has_unfinished():
            self.core.step()
        for request, (_, answer) in zip(requests, texts, strict=True):
            assert request.output_token_ids == list(answer)
        return [(r.first_token_time or 0.0, r.last_token_time or 0.0) for r in requests]
