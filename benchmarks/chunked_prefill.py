"""Chunked prefill on and off: inter-token latency while long prompts arrive.

A few requests decode; then long prompts come, one after another. Without chunks the whole prefill
of each is one step, and everybody waits; with chunks (Sarathi-Serve, arXiv 2403.02310) it is spread
over several.

    mini-infer bench chunked_prefill --output benchmarks/results/chunked_prefill.json

On a GPU, where a prompt must be longer before anybody notices it:

    mini-infer bench chunked_prefill --model benchmarks/models/qwen2.5-7b --load-format dummy \\
        --running 32 --prompt-tokens 512 --output-tokens 256 --long-prompt 8192 --long-prompts 4 \\
        --chunk 512 1024 2048 --temperature 0.6 --peak-bar 80
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from client import Client, Job, random_prompt, warm_up
from harness import (
    Bar,
    Report,
    describe,
    make_parser,
    median,
    open_engine,
    parse,
    percentile,
    positive,
    run,
)

from mini_infer import LLM

PEAK_BAR = 70.0
THROUGHPUT_BAR = 5.0
WARM_TOKENS = 4
"""Each running request gets this many tokens before a long prompt arrives, which gets as many."""
OFF = "off"


@dataclass(frozen=True)
class Interference:
    """One run: milliseconds between the running requests' tokens, and what the others got."""

    peak_ms: float
    p99_ms: float
    median_ms: float
    first_token_ms: float
    """Of the long prompts, the median."""
    tokens_per_second: float
    """Output tokens of all requests, from the first queued to the last finished."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--long-prompt", type=positive, default=1500, help="tokens of each")
    parser.add_argument("--long-prompts", type=positive, default=1, help="how many arrive")
    parser.add_argument("--running", type=positive, default=4, help="requests that decode")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="of each of those")
    parser.add_argument("--output-tokens", type=positive, default=96, help="of each of those")
    parser.add_argument(
        "--chunk", type=positive, nargs="+", help="token budgets of a step, when on"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--peak-bar", type=float, default=PEAK_BAR, help="least fall of the peak")
    arguments = parse(parser, argv, output_tokens=32)
    names: dict[str, int | None] = {"on": None}
    if arguments.chunk:
        many = len(arguments.chunk) > 1
        names = {f"on, {chunk}" if many else "on": chunk for chunk in arguments.chunk}
    runs: dict[str, list[Interference]] = {name: [] for name in (OFF, *names)}
    setup = {}
    # Only one engine is in memory at a time, so that neither pays for the other.
    for _ in range(arguments.repeats):
        for name in runs:
            with open_engine(arguments, **_options(arguments, name != OFF, names.get(name))) as llm:
                runs[name].append(_interfere(llm, arguments))
                print(f"  {name}: {runs[name][-1]}", flush=True)
                if name != OFF:
                    setup = _describe(arguments, llm)

    report = Report("chunked_prefill", "latency while long prompts arrive", setup)
    for name, results in runs.items():
        report.rows.append(
            {
                "chunked prefill": name,
                "peak ITL ms": median([item.peak_ms for item in results]),
                "p99 ITL ms": median([item.p99_ms for item in results]),
                "median ITL ms": median([item.median_ms for item in results]),
                "long prompt TTFT ms": median([item.first_token_ms for item in results]),
                "output tok/s": median([item.tokens_per_second for item in results]),
            }
        )
    report.samples = {name: [asdict(item) for item in results] for name, results in runs.items()}
    _judge(report, runs, arguments.peak_bar)
    report.finish(arguments.output)


def _describe(arguments: argparse.Namespace, llm: LLM) -> dict[str, object]:
    return describe(
        arguments,
        llm.engine.config,
        cache="off",
        long_prompt=arguments.long_prompt,
        long_prompts=arguments.long_prompts,
        running=arguments.running,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        temperature=arguments.temperature,
    )


def _judge(report: Report, runs: dict[str, list[Interference]], peak_bar: float) -> None:
    """By the chunk size with the lowest peak among those that cost little throughput, if any."""

    def fall(name: str, field: str) -> float:
        with_, without = (median([getattr(i, field) for i in runs[n]]) for n in (name, OFF))
        return 100 * (1 - with_ / without)

    chunked = [name for name in runs if name != OFF]
    cheap = [name for name in chunked if fall(name, "tokens_per_second") <= THROUGHPUT_BAR]
    best = max(cheap or chunked, key=lambda name: fall(name, "peak_ms"))
    where = f" ({best})" if len(chunked) > 1 else ""
    report.bars += [
        Bar(f"peak inter-token latency falls by %{where}", fall(best, "peak_ms"), peak_bar),
        Bar(
            f"throughput falls by %{where}",
            fall(best, "tokens_per_second"),
            at_most=THROUGHPUT_BAR,
        ),
    ]


def _options(arguments: argparse.Namespace, chunked: bool, chunk: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_model_len": max(
            arguments.long_prompt + WARM_TOKENS, arguments.prompt_tokens + arguments.output_tokens
        ),
        "max_num_seqs": arguments.running + 1,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": False,
    }
    if chunk is not None:
        options["max_num_batched_tokens"] = chunk
    return options


def _interfere(llm: LLM, arguments: argparse.Namespace) -> Interference:
    rng = random.Random(arguments.seed)
    vocab_size = llm.engine.config.model_config.vocab_size

    def job(num_prompt_tokens: int, num_output_tokens: int) -> Job:
        return Job(random_prompt(rng, vocab_size, num_prompt_tokens), num_output_tokens)

    def jobs() -> list[Job]:
        prompt, output = arguments.prompt_tokens, arguments.output_tokens
        return [job(prompt, output) for _ in range(arguments.running)]

    warm_up(llm, [*jobs(), job(arguments.long_prompt, WARM_TOKENS)])
    with Client(llm, arguments.temperature) as client:
        trace = client.trace
        running = [client.send(item) for item in jobs()]
        late: list[str] = []
        for _ in range(arguments.long_prompts):
            before = {name: len(trace.token_times[name]) for name in running}
            while any(
                len(trace.token_times[name]) < count + WARM_TOKENS and name not in trace.finished
                for name, count in before.items()
            ):
                client.step()
            late.append(client.send(job(arguments.long_prompt, WARM_TOKENS)))
            while not trace.token_times[late[-1]]:
                client.step()
        client.drain()
    first_tokens = [trace.token_times[name][0] for name in late]
    if any(trace.finished[name] < first_tokens[-1] for name in running):
        raise SystemExit(
            "a running request ended before the last long prompt's first token: "
            "raise --output-tokens"
        )
    gaps = [
        gap
        for name, first_token in zip(late, first_tokens, strict=True)
        for gap in trace.inter_token_latencies(running, trace.queued[name], first_token)
    ]
    return Interference(
        peak_ms=1000 * max(gaps),
        p99_ms=1000 * percentile(gaps, 99),
        median_ms=1000 * median(gaps),
        first_token_ms=1000 * median([trace.time_to_first_token(name) for name in late]),
        tokens_per_second=trace.output_tokens_per_second,
    )


if __name__ == "__main__":
    run(main)
