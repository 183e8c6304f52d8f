"""Static against continuous batching: throughput by concurrency, with mixed output lengths.

Both run on the same engine. Static batching starts a group of c requests together and waits for
the longest; continuous batching keeps c requests running, each replaced when it ends (Orca, OSDI
2022). What differs is only when requests are sent.

    mini-infer bench continuous_batching --output benchmarks/results/continuous_batching.json
"""

import random
from collections.abc import Sequence

from client import Job, random_prompt, serve, serve_in_groups, warm_up
from harness import Bar, Report, describe, make_parser, median, open_engine, parse, positive, run

SCALING_BAR = 3.9


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=positive, default=48)
    parser.add_argument("--prompt-tokens", type=positive, nargs=2, default=[16, 64])
    parser.add_argument("--output-tokens", type=positive, nargs=2, default=[16, 96])
    arguments = parse(parser, argv, requests=16, output_tokens=[4, 24])
    rng = random.Random(arguments.seed)
    # Cached prefixes would make the second run of the same prompts another workload.
    with open_engine(
        arguments,
        max_model_len=sum(max(pair) for pair in (arguments.prompt_tokens, arguments.output_tokens)),
        max_num_seqs=max(arguments.concurrency),
        enable_prefix_caching=False,
    ) as llm:
        config = llm.engine.config
        jobs = [
            Job(
                random_prompt(
                    rng, config.model_config.vocab_size, rng.randint(*arguments.prompt_tokens)
                ),
                rng.randint(*arguments.output_tokens),
            )
            for _ in range(arguments.requests)
        ]
        setup = describe(
            arguments,
            config,
            cache="off",
            requests=arguments.requests,
            prompt_tokens="{}-{}".format(*arguments.prompt_tokens),
            output_tokens="{}-{}".format(*arguments.output_tokens),
        )
        runs: dict[tuple[str, int], list[float]] = {}
        for concurrency in arguments.concurrency:
            warm_up(llm, jobs[:concurrency])
        for _ in range(arguments.repeats):
            for concurrency in arguments.concurrency:
                for name, client in (
                    ("static", serve_in_groups(llm, jobs, concurrency)),
                    ("continuous", serve(llm, jobs, concurrency)),
                ):
                    speeds = runs.setdefault((name, concurrency), [])
                    speeds.append(client.trace.output_tokens_per_second)

    speed = {key: median(values) for key, values in runs.items()}
    report = Report("continuous_batching", "static against continuous batching", setup)
    first = arguments.concurrency[0]
    for concurrency in arguments.concurrency:
        static_speed = speed["static", concurrency]
        continuous_speed = speed["continuous", concurrency]
        report.rows.append(
            {
                "concurrency": concurrency,
                "static tok/s": static_speed,
                "continuous tok/s": continuous_speed,
                "continuous / static": continuous_speed / static_speed,
                f"continuous, of {first}": continuous_speed / speed["continuous", first],
            }
        )
    report.samples = {
        f"{name} {concurrency}": runs[name, concurrency] for name, concurrency in runs
    }
    scaling = None
    if {1, 8} <= set(arguments.concurrency):
        scaling = speed["continuous", 8] / speed["continuous", 1]
    report.bars.append(Bar("throughput, concurrency 1 to 8", scaling, SCALING_BAR))
    report.finish(arguments.output)


if __name__ == "__main__":
    run(main)
