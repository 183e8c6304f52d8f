"""What a step costs the host, without a model: scheduling, bookkeeping, output, and collector.

The engine is the real one, its executor answers at once. At depth 2 all of this hides behind the
device as long as it and the launch together take less than the device's step. "whole" is
``LLM.generate``, which reads an answer at its end; "streamed" is what a server's engine does.

Nothing hides what comes before a first token's launch, or behind its step: the last rows have both,
for a prompt of 2,112 tokens, cold and with 2,048 of them cached.

    mini-infer bench host_overhead --batches 1 8 128 256
"""

import argparse
import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from client import random_prompt
from harness import Report, Value, describe, make_parser, median, open_engine, parse, positive, run

from mini_infer import LLM, SamplingParams
from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.outputs import RequestDelta, StepOutput
from mini_infer.runtime.engine import LLMEngine

TOKEN = 65
VOCAB = 256
"""The byte tokenizer's ids without special tokens."""
STEP_BUDGET = 8192
MIXED = (100, 1024)
"""Tokens in and out of the mixed workload."""
FIRST_TOKEN = (2048, 64)
"""Tokens that two prompts share, and those that each has of its own."""
Prompts = list[tuple[list[int], SamplingParams]]


@dataclass(frozen=True)
class KnownStep:
    """A step whose result was known before it ran."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class InstantExecutor:
    """Implements ``Executor``: every chunk that samples says the same token, in no time."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.submitted = 0.0
        """When the last step came."""
        self._decoded = [
            KnownStep(StepOutput(((TOKEN,),) * count)) for count in range(config.max_num_seqs + 1)
        ]

    def start(self) -> int:
        return self._config.max_num_seqs * self._config.max_blocks_per_request

    def submit(self, batch: ScheduledBatch) -> KnownStep:
        self.submitted = time.perf_counter()
        if batch.num_tokens == len(batch.chunks):
            return self._decoded[len(batch.chunks)]
        tokens = tuple((TOKEN,) if chunk.samples else () for chunk in batch.chunks)
        return KnownStep(StepOutput(tokens))

    def shutdown(self) -> None:
        """Holds nothing."""


@dataclass
class Measured:
    """One run of a workload; everything is in seconds."""

    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    parts: Counter[str] = field(default_factory=Counter)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 128, 256])
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--output-tokens", type=positive, default=512)
    parser.add_argument("--mixed", type=int, default=256, help="requests of mixed length; 0: none")
    parser.add_argument("--first-tokens", type=int, default=100, help="medians over them; 0: none")
    parser.add_argument("--depth", type=positive, default=2)
    arguments = parse(parser, argv, batches=[1, 8], output_tokens=32, mixed=2, first_tokens=3)
    rng = random.Random(arguments.seed)
    fixed = (arguments.prompt_tokens, arguments.output_tokens)
    workloads = {f"batch {batch}": make_prompts(rng, batch, *fixed) for batch in arguments.batches}
    if arguments.mixed:
        lengths = (rng.randint(*MIXED) for _ in range(2 * arguments.mixed))
        workloads[f"mixed {arguments.mixed}"] = [
            make_prompts(rng, 1, length, next(lengths))[0] for length in lengths
        ]
    report = Report("host_overhead", "microseconds of the host per step, without a model", {})
    for name, prompts in workloads.items():
        longest = max(len(ids) + (params.max_tokens or 0) for ids, params in prompts)
        with instant_engine(arguments, longest, len(prompts)) as (llm, _):
            config = llm.engine.config
            for answers, serve in (("whole", generate), ("streamed", stream)):
                serve(llm, prompts)  # what is made on first use is made here
                runs = [measure(llm, serve, prompts) for _ in range(arguments.repeats)]
                with timed_parts(llm.engine) as parts:
                    runs.append(measure(llm, serve, prompts))
                report.rows.append(row_of(name, answers, runs, parts))
                report.samples[f"{name}, {answers}"] = [
                    1e6 * item.seconds / len(item.steps) for item in runs
                ]
            report.setup = describe(
                arguments,
                config,
                cache="empty",
                prompt_tokens=arguments.prompt_tokens,
                output_tokens=arguments.output_tokens,
                mixed="{}-{} in and out".format(*MIXED),
            ) | {"model": "none: the executor answers at once", "weights": "none"}
    if arguments.first_tokens:
        with instant_engine(arguments, sum(FIRST_TOKEN) + 1, 1) as (llm, executor):
            report.rows += first_token_rows(llm, executor, rng, arguments.first_tokens)
    report.finish(arguments.output)


@contextmanager
def instant_engine(
    arguments: argparse.Namespace, max_model_len: int, max_num_seqs: int
) -> Iterator[tuple[LLM, InstantExecutor]]:
    """An engine whose steps take no time, and what they run on."""
    with open_engine(
        arguments,
        dry_run=True,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=STEP_BUDGET,
        depth=arguments.depth,
    ) as llm:
        executor = InstantExecutor(llm.engine.config)
        llm.engine = LLMEngine(llm.engine.config, executor, llm.engine.tokenizer)
        gc.collect()
        gc.freeze()  # as an engine with a model does when it has started
        yield llm, executor


def first_token_rows(
    llm: LLM, executor: InstantExecutor, rng: random.Random, repeats: int
) -> list[dict[str, Value]]:
    """Prompts one at a time: the first of a pair is new, the second has its head cached."""
    shared, own = FIRST_TOKEN
    before: dict[str, list[float]] = {"cold": [], "cached": []}
    behind: dict[str, list[float]] = {"cold": [], "cached": []}
    for _ in range(repeats):
        llm.engine.reset_prefix_cache()
        head = random_prompt(rng, VOCAB, shared)
        for name in before:
            prompts = make_prompts(rng, 1, own, 1)
            prompts[0][0][:0] = head
            started = time.perf_counter()
            generate(llm, prompts)
            ended = time.perf_counter()
            before[name].append(1e6 * (executor.submitted - started))
            behind[name].append(1e6 * (ended - executor.submitted))
    return [
        {
            "workload": f"first token, {name}",
            "answers": "whole",
            "steps": repeats,
            "step us": median([sum(pair) for pair in zip(before[name], behind[name], strict=True)]),
            "before its launch us": median(before[name]),
            "behind it us": median(behind[name]),
        }
        for name in before
    ]


def make_prompts(rng: random.Random, count: int, prompt_tokens: int, output_tokens: int) -> Prompts:
    params = SamplingParams(temperature=0.6, max_tokens=output_tokens, ignore_eos=True)
    return [(random_prompt(rng, VOCAB, prompt_tokens), params) for _ in range(count)]


def generate(llm: LLM, prompts: Prompts) -> None:
    llm.generate([ids for ids, _ in prompts], [params for _, params in prompts], use_tqdm=False)


def stream(llm: LLM, prompts: Prompts) -> None:
    for index, (ids, params) in enumerate(prompts):
        llm.engine.add_request(str(index), ids, params)
    while llm.engine.has_unfinished():
        llm.engine.step()


def measure(llm: LLM, serve: Callable[[LLM, Prompts], None], prompts: Prompts) -> Measured:
    """One run over an empty prefix cache."""
    llm.engine.reset_prefix_cache()
    result = Measured()
    original = llm.engine.step

    def step() -> list[RequestDelta]:
        started = time.perf_counter()
        deltas = original()
        result.steps.append(time.perf_counter() - started)
        return deltas

    def on_collection(phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        result.parts["gc"] += -now if phase == "start" else now  # type: ignore[assignment]

    gc.callbacks.append(on_collection)
    llm.engine.step = step  # type: ignore[method-assign]
    try:
        started = time.perf_counter()
        serve(llm, prompts)
        result.seconds = time.perf_counter() - started
    finally:
        llm.engine.step = original  # type: ignore[method-assign]
        gc.callbacks.remove(on_collection)
    return result


@contextmanager
def timed_parts(engine: LLMEngine) -> Iterator[Counter[str]]:
    """Adds up the seconds of each part of the engine's steps; that costs a little itself."""
    seconds: Counter[str] = Counter()
    owners = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.scheduler, "update", "update"),
        (engine._output_processor, "process", "output"),
    ]

    def timed(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = original(*args)
            seconds[part] += time.perf_counter() - started  # type: ignore[assignment]
            return result

        return call

    for owner, method, part in owners:
        setattr(owner, method, timed(part, getattr(owner, method)))
    try:
        yield seconds
    finally:
        for owner, method, _ in owners:
            delattr(owner, method)


def row_of(
    name: str, answers: str, runs: Sequence[Measured], parts: Counter[str]
) -> dict[str, Value]:
    *plain, timed = runs
    num_steps = len(timed.steps)
    shares = {
        f"{part} us": 1e6 * parts[part] / num_steps for part in ("schedule", "update", "output")
    }
    return {
        "workload": name,
        "answers": answers,
        "steps": num_steps,
        "step us": median([1e6 * item.seconds / len(item.steps) for item in plain]),
        **shares,
        "other us": 1e6 * timed.seconds / num_steps - sum(shares.values()),
        "median step us": median([1e6 * median(item.steps) for item in plain]),
        "longest step ms": median([1e3 * max(item.steps) for item in plain]),
        "gc us": median([1e6 * item.parts["gc"] / len(item.steps) for item in plain]),
    }


if __name__ == "__main__":
    run(main)
