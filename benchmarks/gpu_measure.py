"""Runs the GPU workloads through ``LLM.generate`` and keeps what each took."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from client import Job, random_prompt
from gpu_workloads import CONCURRENCY, FIRST_TOKEN, MIXED, Sizes
from harness import median
from kv_waste import KVWaste
from limits import Card, ModelCost, workload_seconds

from mini_infer import LLM, SamplingParams
from mini_infer.core.outputs import RequestOutput

TEMPERATURE = 0.6
CONCURRENCIES = (1, 2, 4, 8)
COLD, CACHED = f"{FIRST_TOKEN}, cold", f"{FIRST_TOKEN}, cached"
PREFILL = "prefill"
LONE = ("batch 1", "context 3800")
"""One request: without its prefill, what is left is the time per token."""
WARM_OUTPUT, WARM_REQUESTS = 4, 32
PROFILED_OUTPUT = 64
"""Output tokens of a request, at most, where only a trace is wanted."""
PROFILED_FROM_START = (PREFILL, FIRST_TOKEN)
"""They have no steady decode to wait for."""


@dataclass(frozen=True)
class Shape:
    """A workload in numbers, for its row of the table."""

    requests: int
    tokens_in: int
    tokens_out: int

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> "Shape":
        """Tokens over all requests."""
        return cls(
            len(jobs),
            sum(len(job.prompt_token_ids) for job in jobs),
            sum(job.num_output_tokens for job in jobs),
        )


@dataclass
class Measurements:
    """By workload: seconds of every repeat, and the seconds that the card would need."""

    card: Card
    cost: ModelCost
    shapes: dict[str, Shape] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    kv_waste: float | None = None
    """Percent of the allocated tokens, over the mixed workload."""

    def add(self, name: str, jobs: Sequence[Job], seconds: float, cached: int = 0) -> None:
        """One repeat of a whole call; ``cached`` tokens of each prompt were in KV."""
        if name not in self.limits:
            self.shapes[name] = Shape.of(jobs)
            self.limits[name] = workload_seconds(self.card, self.cost, jobs, cached)
        self.seconds.setdefault(name, []).append(seconds)

    def add_decode(self, name: str, job: Job, seconds: float) -> None:
        """One repeat of a lone request's time from its first token to its last."""
        if name not in self.limits:
            prefill, whole = (
                workload_seconds(self.card, self.cost, [part])
                for part in (replace(job, num_output_tokens=1), job)
            )
            self.limits[name] = whole - prefill
            rest = replace(job, num_output_tokens=job.num_output_tokens - 1)
            self.shapes[name] = Shape.of([rest])
        self.seconds.setdefault(name, []).append(seconds)

    def figure(self, name: str) -> float | None:
        """Median, in ``unit(name)``; None where it was not measured."""
        times = self.seconds.get(name)
        return self.in_units(name, median(times)) if times else None

    def limit(self, name: str) -> float:
        return self.in_units(name, self.limits[name])

    def of_limit(self, name: str) -> float:
        """1 where the engine does nothing but what the card has to do."""
        return self.limits[name] / median(self.seconds[name])

    def in_units(self, name: str, seconds: float) -> float:
        """Output tokens over the whole call; a prefill's are its prompts'."""
        if unit(name) == "ms":
            return 1000 * seconds
        shape = self.shapes[name]
        return (shape.tokens_in if name == PREFILL else shape.tokens_out) / seconds


def unit(name: str) -> str:
    return "ms" if name.startswith(FIRST_TOKEN) else "tok/s"


def timed(llm: LLM, jobs: Sequence[Job]) -> tuple[float, list[RequestOutput]]:
    """Seconds of one call of ``generate``, as its caller sees them."""
    prompts = [job.prompt_token_ids for job in jobs]
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=job.num_output_tokens, ignore_eos=True)
        for job in jobs
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started, outputs


def warm_up(llm: LLM, sizes: Sequence[int]) -> None:
    """Short requests of a few batch sizes, so that their kernels are compiled."""
    rng = random.Random(-1)
    vocab_size = llm.engine.config.model_config.vocab_size
    for size in sizes:
        timed(llm, [Job(random_prompt(rng, vocab_size, 24), WARM_OUTPUT) for _ in range(size)])


def rehearse(llm: LLM, name: str, sizes: Sizes) -> None:
    """The beginning of a workload: its first requests, a few tokens out. What shapes like its own
    compile or allocate at first is no part of its figure."""
    if name == FIRST_TOKEN:
        for job in sizes.shared_prefix(-1, llm.engine.config.block_size)[:2]:  # cold, cached
            timed(llm, [job])
    else:
        timed(llm, short_jobs(name, sizes, WARM_OUTPUT)[:WARM_REQUESTS])


def measure(
    llm: LLM, name: str, sizes: Sizes, seed: int, num_first_tokens: int, found: Measurements
) -> None:
    """One repeat of the workload ``name``; its figures go to ``found``, and are printed at once, so
    that a run that is cut short has not been for nothing."""
    counts = {part: len(times) for part, times in found.seconds.items()}
    if name == FIRST_TOKEN:
        for index in range(num_first_tokens):
            _measure_first_tokens(llm, sizes, 1000 * seed + index, found)
    elif name == CONCURRENCY:
        for requests in CONCURRENCIES:
            _measure_call(llm, f"{name} {requests}", sizes.concurrent(requests, seed), found)
    elif name == MIXED and found.kv_waste is None:  # once: listening costs the host a little
        waste = KVWaste(llm.engine.config.block_size)
        llm.engine.events.subscribe(waste.observe, *KVWaste.HEARS)
        _measure_call(llm, name, sizes.mixed(), found)
        llm.engine.events.unsubscribe(waste.observe)
        found.kv_waste = waste.percent
    elif name == MIXED:
        _measure_call(llm, name, sizes.mixed(), found)
    else:
        _measure_call(llm, name, sizes.batch(name, seed), found)
    for part, seconds in found.seconds.items():
        if len(seconds) > counts.get(part, 0):
            print(f"  {part}: {found.in_units(part, seconds[-1]):.5g} {unit(part)}", flush=True)


def short_jobs(name: str, sizes: Sizes, most: int) -> list[Job]:
    """The workload with at most that many tokens out of each request."""
    if name == FIRST_TOKEN:
        jobs = [sizes.shared_prefix(0, block_size=1)[0]]
    elif name == CONCURRENCY:
        jobs = sizes.concurrent(max(CONCURRENCIES), 0)
    else:
        jobs = sizes.mixed() if name == MIXED else sizes.batch(name, 0)
    return [Job(job.prompt_token_ids, min(job.num_output_tokens, most)) for job in jobs]


def _measure_call(llm: LLM, name: str, jobs: Sequence[Job], found: Measurements) -> None:
    llm.engine.reset_prefix_cache()
    seconds, outputs = timed(llm, jobs)
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != sum(job.num_output_tokens for job in jobs):
        raise SystemExit(f"{name}: {made} tokens came out, which is not what was asked for")
    found.add(name, jobs, seconds)
    if name in LONE and jobs[0].num_output_tokens > 1:
        metrics = outputs[0].metrics
        assert metrics.first_token_time is not None
        assert metrics.last_token_time is not None
        seconds = metrics.last_token_time - metrics.first_token_time
        found.add_decode(f"{name}, decode", jobs[0], seconds)


def _measure_first_tokens(llm: LLM, sizes: Sizes, seed: int, found: Measurements) -> None:
    llm.engine.reset_prefix_cache()
    cold, cached, shared = sizes.shared_prefix(seed, llm.engine.config.block_size)
    for name, job, expected in ((COLD, cold, 0), (CACHED, cached, shared)):
        seconds, (output,) = timed(llm, [job])
        if output.num_cached_tokens != expected:
            raise SystemExit(
                f"{name}: {output.num_cached_tokens} tokens were cached, not {expected}: "
                "the KV cache is too small, or prefix caching is off"
            )
        found.add(name, [job], seconds, cached=expected)
