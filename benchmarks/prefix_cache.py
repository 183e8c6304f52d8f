"""Prefix cache on and off: time to first token of prompts that share their beginning.

mini-infer bench prefix_cache --output benchmarks/results/prefix_cache.json
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from client import Client, Job, random_prompt, warm_up
from harness import Bar, Report, describe, make_parser, median, open_engine, parse, positive, run

from mini_infer import LLM

FALL_BAR = 80.0


@dataclass(frozen=True)
class Sharing:
    """Requests one after another: milliseconds to the first token, and tokens found cached."""

    first_ms: float
    """Of the request that meets an empty cache."""
    later_ms: float
    """Median of those after it."""
    hit_tokens: float
    """Median of those after it."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shared", type=positive, default=512, help="tokens of the shared prefix")
    parser.add_argument("--unique", type=positive, default=32, help="tokens after it")
    parser.add_argument("--requests", type=positive, default=8, help="after the first one")
    arguments = parse(parser, argv, requests=2)
    runs: dict[bool, list[Sharing]] = {True: [], False: []}
    setup = {}
    for _ in range(arguments.repeats):
        for cached in runs:
            with open_engine(
                arguments,
                max_model_len=arguments.shared + arguments.unique + 2,
                enable_prefix_caching=cached,
            ) as llm:
                runs[cached].append(_share(llm, arguments))
                setup = describe(
                    arguments,
                    llm.engine.config,
                    cache="off, or empty before the first request",
                    shared_tokens=arguments.shared,
                    unique_tokens=arguments.unique,
                    requests=arguments.requests,
                )

    off, on = runs[False], runs[True]
    without = median([item.later_ms for item in off])
    report = Report("prefix_cache", "time to first token with a shared prefix", setup)
    for name, times, hits in (
        ("off", [item.later_ms for item in off], [item.hit_tokens for item in off]),
        ("on, first request", [item.first_ms for item in on], [0.0]),
        ("on, later requests", [item.later_ms for item in on], [item.hit_tokens for item in on]),
    ):
        report.rows.append(
            {
                "prefix cache": name,
                "TTFT ms": median(times),
                "hit tokens": int(median(hits)),
                "of off": median(times) / without,
            }
        )
    report.samples = {
        "on" if cached else "off": [asdict(item) for item in runs[cached]] for cached in runs
    }
    fall = 100 * (1 - median([item.later_ms for item in on]) / without)
    report.bars.append(Bar("time to first token falls by %", fall, FALL_BAR))
    report.finish(arguments.output)


def _share(llm: LLM, arguments: argparse.Namespace) -> Sharing:
    rng = random.Random(arguments.seed)
    vocab_size = llm.engine.config.model_config.vocab_size
    prefix = random_prompt(rng, vocab_size, arguments.shared)
    warm_up(llm, [Job(prefix, 1)])
    llm.engine.reset_prefix_cache()
    with Client(llm) as client:
        names = []
        for _ in range(1 + arguments.requests):
            names.append(
                client.send(Job(prefix + random_prompt(rng, vocab_size, arguments.unique), 1))
            )
            client.drain()
    first, *later = (1000 * client.trace.time_to_first_token(name) for name in names)
    return Sharing(first, median(later), median([client.trace.cached[name] for name in names[1:]]))


if __name__ == "__main__":
    run(main)
