"""Time to first token of short requests while a flood of long prompts comes, against no flood.

The flood never ends: as soon as one long prompt has its answer, the next is sent, with so many
under way at any time. Short requests come as a Poisson process, the same ones with the flood and
without.

    mini-infer bench serving_fairness
"""

import asyncio
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness import Bar, Report, Value, median, positive
from servers import (
    describe_servers,
    make_server_parser,
    mini_infer_server,
    model_options,
    parse_quick,
    started,
)

from mini_infer.cli.load.arrivals import arrival_times
from mini_infer.cli.load.client import Record, open_session, send
from mini_infer.cli.load.figures import percentile, samples_of
from mini_infer.cli.load.run import Job, Target, run_loop, send_all
from mini_infer.cli.load.workload import Words

UNLOADED, FLOODED = "alone", "in a flood of long prompts"


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_server_parser(__doc__, repeats=1)
    parser.add_argument("--requests", type=positive, default=60, help="short ones")
    parser.add_argument("--rate", type=float, default=0.5, help="short requests a second")
    parser.add_argument("--prompt-tokens", type=positive, default=88, help="of a short request")
    parser.add_argument("--output-tokens", type=positive, default=4, help="of a short request")
    parser.add_argument("--long-prompt", type=positive, default=1200, help="tokens, about")
    parser.add_argument("--long-output", type=positive, default=8, help="tokens")
    parser.add_argument("--flood", type=positive, default=4, help="long requests at any time")
    parser.add_argument("--policy", default="fcfs", help="scheduling policy of the server")
    arguments = parse_quick(parser, argv, requests=4, rate=50.0, long_prompt=200, flood=2)
    command = mini_infer_server(
        *(*model_options(arguments), "--max-model-len", 2048, "--log-interval", 0),
        *("--scheduling-policy", arguments.policy),
    )
    runs: dict[str, list[dict[str, Any]]] = {UNLOADED: [], FLOODED: []}
    with started(command) as server:
        for _ in range(arguments.repeats):
            for name in runs:
                flood = arguments.flood if name == FLOODED else 0
                runs[name].append(run_loop(measure(server.url, arguments, flood)))
                print(f"  {name}: {runs[name][-1]}", file=sys.stderr)
    report = Report(
        "serving_fairness",
        f"{arguments.requests} short requests, {arguments.flood} long ones at any time",
        describe_servers(
            arguments,
            **{
                "short": f"{arguments.prompt_tokens}+{arguments.output_tokens}",
                "long": f"{arguments.long_prompt}+{arguments.long_output}",
                "short ones a second": arguments.rate,
            },
        ),
    )
    report.setup["scheduling policy"] = arguments.policy
    p99 = {}
    for name, figures in runs.items():
        row: dict[str, Value] = {"short requests": name}
        row |= {key: median([run[key] for run in figures]) for key in figures[0]}
        p99[name] = median([run["p99 TTFT ms"] for run in figures])
        report.rows.append(row)
    report.bars = [Bar("p99 TTFT / alone", p99[FLOODED] / p99[UNLOADED], at_most=3)]
    report.samples = dict(runs)
    report.finish(arguments.output)


async def measure(url: str, arguments: Any, flood: int) -> dict[str, float]:
    """Sends the short requests, with ``flood`` long ones under way beside them."""
    rng = random.Random(arguments.seed)
    words = Words()
    arrivals = arrival_times(arguments.requests, arguments.rate, 1.0, rng)
    jobs = [
        Job(words.text(rng, arguments.prompt_tokens), arguments.output_tokens, arrival)
        for arrival in arrivals
    ]
    target = Target(url, "completions", {"temperature": 0, "ignore_eos": True})
    urgent = target
    if arguments.policy != "fcfs":  # which takes no priorities
        urgent = replace(target, fields={**target.fields, "priority": -1})
    long_ones: list[Record] = []
    numbers = itertools.count()
    async with open_session() as session:
        await session.post(f"{url}/reset_prefix_cache")

        async def send_long_ones() -> None:
            while True:
                own = random.Random(f"{arguments.seed} {next(numbers)}")
                job = Job(words.text(own, arguments.long_prompt), arguments.long_output)
                long_ones.append(await send(session, target.url, target.body(job)))

        floods = [asyncio.create_task(send_long_ones()) for _ in range(flood)]
        if flood:
            await asyncio.sleep(1)  # it is there when the first short request comes
        num_before = len(long_ones)
        records = await send_all(session, urgent, jobs)
        num_during = len(long_ones) - num_before
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
    for record in (*records, *long_ones):
        if record.error:
            raise SystemExit(f"a request failed: {record.error}")
    ttfts = samples_of(records, "ttft")
    seconds = max(record.start + record.latency for record in records) - records[0].start
    return {
        "median TTFT ms": percentile(ttfts, 50),
        "p99 TTFT ms": percentile(ttfts, 99),
        "worst TTFT ms": max(ttfts),
        "long prompts answered a second": num_during / seconds,
    }


if __name__ == "__main__":
    main()
