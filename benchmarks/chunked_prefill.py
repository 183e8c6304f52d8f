"""Chunked prefill on and off: inter-token latency while a long prompt arrives.

A few requests decode; then a long prompt comes. Without chunks its whole prefill is one step, and
everybody waits; with chunks (Sarathi-Serve, arXiv 2403.02310) it is spread over several.

    mini-infer bench chunked_prefill --output benchmarks/results/chunked_prefill.json
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

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
WARM_TOKENS = 4
"""Each running request has this many tokens before the long prompt arrives."""


@dataclass(frozen=True)
class Interference:
    """One run: milliseconds between the running requests' tokens, and what the others got."""

    peak_ms: float
    p99_ms: float
    median_ms: float
    first_token_ms: float
    """Of the long prompt."""
    tokens_per_second: float
    """Output tokens of all requests, from the first queued to the last finished."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--long-prompt", type=positive, default=1500)
    parser.add_argument("--running", type=positive, default=4, help="requests that decode")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="of each of those")
    parser.add_argument("--output-tokens", type=positive, default=96, help="of each of those")
    parser.add_argument("--chunk", type=positive, help="token budget of a step, when on")
    arguments = parse(parser, argv, output_tokens=32)
    runs: dict[bool, list[Interference]] = {True: [], False: []}
    setup = {}
    # Only one engine is in memory at a time, so that neither pays for the other.
    for _ in range(arguments.repeats):
        for chunked in runs:
            with open_engine(arguments, **_options(arguments, chunked)) as llm:
                runs[chunked].append(_interfere(llm, arguments))
                if chunked:
                    setup = describe(
                        arguments,
                        llm.engine.config,
                        cache="off",
                        long_prompt=arguments.long_prompt,
                        running=arguments.running,
                        prompt_tokens=arguments.prompt_tokens,
                        output_tokens=arguments.output_tokens,
                    )

    report = Report("chunked_prefill", "latency while a long prompt arrives", setup)
    for chunked, name in ((False, "off"), (True, "on")):
        report.rows.append(
            {
                "chunked prefill": name,
                "peak ITL ms": median([item.peak_ms for item in runs[chunked]]),
                "p99 ITL ms": median([item.p99_ms for item in runs[chunked]]),
                "median ITL ms": median([item.median_ms for item in runs[chunked]]),
                "long prompt TTFT ms": median([item.first_token_ms for item in runs[chunked]]),
                "output tok/s": median([item.tokens_per_second for item in runs[chunked]]),
            }
        )
    peak = {chunked: median([item.peak_ms for item in runs[chunked]]) for chunked in runs}
    fall = 100 * (1 - peak[True] / peak[False])
    report.samples = {
        "on" if chunked else "off": [asdict(item) for item in runs[chunked]] for chunked in runs
    }
    report.bars.append(Bar("peak inter-token latency falls by %", fall, PEAK_BAR))
    report.finish(arguments.output)


def _options(arguments: argparse.Namespace, chunked: bool) -> dict[str, object]:
    options: dict[str, object] = {
        "max_model_len": max(
            arguments.long_prompt + WARM_TOKENS, arguments.prompt_tokens + arguments.output_tokens
        ),
        "max_num_seqs": arguments.running + 1,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": False,
    }
    if chunked and arguments.chunk:
        options["max_num_batched_tokens"] = arguments.chunk
    return options


def _interfere(llm: LLM, arguments: argparse.Namespace) -> Interference:
    rng = random.Random(arguments.seed)
    vocab_size = llm.engine.config.model_config.vocab_size

    def job(num_prompt_tokens: int, num_output_tokens: int) -> Job:
        return Job(random_prompt(rng, vocab_size, num_prompt_tokens), num_output_tokens)

    running_jobs = [
        job(arguments.prompt_tokens, arguments.output_tokens) for _ in range(arguments.running)
    ]
    warm_up(llm, running_jobs)
    with Client(llm) as client:
        trace = client.trace
        running = [client.send(item) for item in running_jobs]
        while min(len(trace.token_times[name]) for name in running) < WARM_TOKENS:
            client.step()
        late = client.send(job(arguments.long_prompt, WARM_TOKENS))
        client.drain()
    arrived, first_token = trace.queued[late], trace.token_times[late][0]
    if any(trace.finished[name] < first_token for name in running):
        raise SystemExit(
            "a running request ended before the long prompt's first token: raise --output-tokens"
        )
    gaps = trace.inter_token_latencies(running, arrived, first_token)
    return Interference(
        peak_ms=1000 * max(gaps),
        p99_ms=1000 * percentile(gaps, 99),
        median_ms=1000 * median(gaps),
        first_token_ms=1000 * trace.time_to_first_token(late),
        tokens_per_second=trace.output_tokens_per_second,
    )


if __name__ == "__main__":
    run(main)
