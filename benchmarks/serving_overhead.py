"""Output tokens per second of 32 streams over HTTP, against the offline LLM class.

The same requests on the same model by turns: every one streamed to a client of its own at the same
time, and as one call of ``LLM.generate``. The prefix cache is emptied before each.

    mini-infer bench serving_overhead
"""

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
from harness import Bar, Report, median, positive
from servers import (
    RunningServer,
    describe_servers,
    make_server_parser,
    mini_infer_server,
    model_options,
    parse_quick,
    started,
)

from mini_infer import LLM, SamplingParams
from mini_infer.cli.load.client import open_session
from mini_infer.cli.load.figures import figures
from mini_infer.cli.load.run import Job, Target, run_loop, send_all
from mini_infer.cli.load.workload import Words

KV_CACHE_MEMORY = "512MiB"
WARM_UP_TOKENS = 4
OFFLINE, HTTP = "LLM.generate", "32 streams over HTTP"


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_server_parser(__doc__, repeats=5)
    parser.add_argument("--streams", type=positive, default=32, help="concurrent ones")
    parser.add_argument("--prompt-tokens", type=positive, default=64, help="of each, about")
    parser.add_argument("--output-tokens", type=positive, default=64, help="of each")
    arguments = parse_quick(parser, argv, streams=4, output_tokens=8)
    rng = random.Random(arguments.seed)
    jobs = [
        Job(Words().text(rng, arguments.prompt_tokens), arguments.output_tokens)
        for _ in range(arguments.streams)
    ]
    warm_up = [Job(job.prompt, WARM_UP_TOKENS) for job in jobs]
    rates: dict[str, list[float]] = {OFFLINE: [], HTTP: []}
    cpu: dict[str, list[float]] = {OFFLINE: [], HTTP: []}
    ttfts: list[float] = []
    options: dict[str, Any] = {
        "kv_cache_memory": KV_CACHE_MEMORY,
        "max_num_seqs": arguments.streams,
        "dry_run": arguments.dry_run,
    }
    command = mini_infer_server(
        *(*model_options(arguments), "--kv-cache-memory", KV_CACHE_MEMORY),
        *("--max-num-seqs", arguments.streams),
    )
    same = 0
    with started(command) as server, LLM(arguments.model, **options) as llm:
        offline(llm, warm_up)
        over_http(server, warm_up)
        for _ in range(arguments.repeats):
            before = psutil.Process().cpu_times().user
            texts, rate = offline(llm, jobs)
            rates[OFFLINE].append(rate)
            cpu[OFFLINE].append(psutil.Process().cpu_times().user - before)
            before = psutil.Process().cpu_times().user
            streamed, result = over_http(server, jobs)
            cpu[HTTP].append(psutil.Process().cpu_times().user - before)
            rates[HTTP].append(result["output_tokens_per_second"])
            ttfts.append(result["ttft_ms"]["p99"])
            same = sum(map(str.__eq__, texts, streamed))
            print(f"  {rates[OFFLINE][-1]:.0f}, {rates[HTTP][-1]:.0f} tok/s", file=sys.stderr)
    report = Report(
        "serving_overhead",
        f"{arguments.streams} requests at once",
        describe_servers(
            arguments,
            **{
                "streams": arguments.streams,
                "prompt tokens": arguments.prompt_tokens,
                "output tokens": arguments.output_tokens,
            },
        ),
    )
    offline_rate, rate = median(rates[OFFLINE]), median(rates[HTTP])
    # Of the runs beside each other: a machine that others use is not equally fast for long.
    ratio = median([http / alone for alone, http in zip(*rates.values(), strict=True)])
    report.rows = [
        {"way": OFFLINE, "output tok/s": offline_rate, "of offline": 1.0},
        {
            "way": HTTP,
            "output tok/s": rate,
            "of offline": ratio,
            "p99 TTFT ms": median(ttfts),
            "client's CPU s": median(cpu[HTTP]),
        },
    ]
    report.bars = [Bar("throughput over HTTP / offline, of each repeat", ratio, at_least=0.9)]
    report.notes = [f"identical texts: {same} of {len(jobs)}"]
    report.samples = {"output tok/s": rates}
    report.finish(arguments.output)


def offline(llm: LLM, jobs: Sequence[Job]) -> tuple[list[str], float]:
    """The texts, and output tokens per second."""
    llm.engine.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=jobs[0].num_output_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return [output.outputs[0].text for output in outputs], num_tokens / seconds


def over_http(server: RunningServer, jobs: Sequence[Job]) -> tuple[list[str], dict[str, Any]]:
    """The texts, and what the load generator found."""

    async def work() -> tuple[list[str], dict[str, Any]]:
        target = Target(server.url, "completions", {"temperature": 0, "ignore_eos": True})
        async with open_session() as session:
            await session.post(f"{server.url}/reset_prefix_cache")
            records = await send_all(session, target, jobs)
        for record in records:
            if record.error:
                raise SystemExit(f"a request failed: {record.error}")
        return [record.text for record in records], figures(records)

    return run_loop(work())


if __name__ == "__main__":
    main()
