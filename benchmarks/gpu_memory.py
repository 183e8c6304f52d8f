"""The largest batches at ``gpu_memory_utilization`` 0.95: peak memory against the limit.

All that takes memory at once: 256 requests with long prompts, log-probabilities of the 20 likeliest
tokens, penalties, nucleus sampling; then prompts whose every position's log-probabilities are
asked for. A run that comes to its end has not run out of memory.

    mini-infer bench gpu_memory --output benchmarks/results/gpu_memory.json
"""

import argparse
import random
import time
from collections.abc import Sequence

import torch
from client import random_prompt
from harness import (
    Bar,
    Report,
    bundled_model,
    describe,
    make_parser,
    open_engine,
    parse,
    positive,
    require_gpu,
    run,
)

from mini_infer import SamplingParams
from mini_infer.core.errors import StepError
from mini_infer.core.events import Event, StepCompleted
from mini_infer.core.sampling_params import MAX_LOGPROBS

GIB = 2**30
UTILIZATION = 0.95


class DeviceMemory:
    """Bytes of the GPU that are taken, by whomever: the most that was seen after any step."""

    def __init__(self) -> None:
        self.peak = 0
        _, self.total = torch.cuda.mem_get_info()

    def observe(self, event: Event) -> None:
        if isinstance(event, StepCompleted):
            free, _ = torch.cuda.mem_get_info()
            self.peak = max(self.peak, self.total - free)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=1)
    parser.set_defaults(load_format="dummy", model=bundled_model("qwen2.5-7b"))
    parser.add_argument("--requests", type=positive, default=256)
    parser.add_argument("--prompt-tokens", type=positive, default=1024)
    parser.add_argument("--output-tokens", type=positive, default=24)
    parser.add_argument("--prompt-logprobs", type=positive, default=4, help="requests with those")
    parser.add_argument("--their-tokens", type=positive, default=8000, help="of each one's prompt")
    parser.add_argument("--utilization", type=float, default=UTILIZATION)
    arguments = parse(parser, argv, prompt_tokens=64, output_tokens=4, their_tokens=512)
    require_gpu()
    memory = DeviceMemory()
    num_ended = 0
    with open_engine(
        arguments,
        gpu_memory_utilization=arguments.utilization,
        max_num_seqs=arguments.requests,
        max_model_len=max(arguments.prompt_tokens, arguments.their_tokens)
        + arguments.output_tokens,
        enable_prefix_caching=False,
    ) as llm:
        config = llm.engine.config
        report = Report(
            "gpu_memory",
            "the largest batches: peak memory against the limit",
            describe(
                arguments,
                config,
                cache="off",
                requests=arguments.requests,
                prompt_tokens=arguments.prompt_tokens,
                output_tokens=arguments.output_tokens,
                prompts_with_logprobs=arguments.prompt_logprobs,
                their_tokens=arguments.their_tokens,
                gpu_memory_utilization=arguments.utilization,
            ),
        )
        memory.observe(StepCompleted(0.0, 0, 0, 0, 0, 0, 0, 0))
        report.rows.append(_row("start-up", memory, 0.0))
        llm.engine.events.subscribe(memory.observe, StepCompleted)
        for name, prompts, params in _workloads(arguments, config.model_config.vocab_size):
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            try:
                llm.generate(prompts, params, use_tqdm=False)
                num_ended += 1
            except StepError as error:
                report.notes.append(f"{name}: {error}")
            report.rows.append(_row(name, memory, time.perf_counter() - started))
            print(f"  {report.rows[-1]}", flush=True)
        llm.engine.events.unsubscribe(memory.observe)
    workloads = len(report.rows) - 1
    report.bars.append(Bar("workloads that came to their end", num_ended, workloads))
    report.finish(arguments.output)


def _workloads(
    arguments: argparse.Namespace, vocab_size: int
) -> list[tuple[str, list[list[int]], SamplingParams]]:
    rng = random.Random(arguments.seed)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [random_prompt(rng, vocab_size, length) for _ in range(count)]

    heavy = SamplingParams(
        temperature=0.6,
        top_p=0.95,
        top_k=50,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logprobs=MAX_LOGPROBS,
        max_tokens=arguments.output_tokens,
        ignore_eos=True,
    )
    plain = SamplingParams(temperature=0.6, max_tokens=arguments.output_tokens, ignore_eos=True)
    positions = SamplingParams(prompt_logprobs=MAX_LOGPROBS, max_tokens=1)
    batch = prompts(arguments.requests, arguments.prompt_tokens)
    return [
        ("plain", batch, plain),
        ("log-probabilities, penalties", batch, heavy),
        (
            "prompt log-probabilities",
            prompts(arguments.prompt_logprobs, arguments.their_tokens),
            positions,
        ),
    ]


def _row(name: str, memory: DeviceMemory, seconds: float) -> dict[str, str | int | float | None]:
    return {
        "workload": name,
        "seconds": seconds,
        "peak allocated GiB": torch.cuda.max_memory_allocated() / GIB,
        "reserved GiB": torch.cuda.memory_reserved() / GIB,
        "card GiB": memory.peak / GIB,
        "of the card": memory.peak / memory.total,
    }


if __name__ == "__main__":
    run(main)
