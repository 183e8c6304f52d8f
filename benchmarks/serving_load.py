"""Token rate of 512 streams of the dry run, against a bare FastAPI application.

The bare application streams chunks that were made beforehand, of the size that the dry run's have,
one of every stream by turns, as tokens come. Both have one server process at a time beside the same
load generator on the same machine, by turns, so that the ratio means something where rates do not.

    mini-infer bench serving_load
"""

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from harness import Bar, Report, Value, median, positive
from servers import (
    RunningServer,
    describe_servers,
    make_server_parser,
    mini_infer_server,
    parse_quick,
    started,
)

from mini_infer.cli.load.client import Record, open_session
from mini_infer.cli.load.figures import count_errors, percentile, samples_of
from mini_infer.cli.load.run import Job, Target, run_loop, send_all

BARE_SERVER = """
import asyncio
import socket
import sys

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

num_chunks, size, by_turns = map(int, sys.argv[1:])
head = b'data: {"choices":[{"index":0,"delta":{"content":"'
tail = b'"},"finish_reason":null}]}\\n\\n'
chunk = head + b"x" * (size - len(head) - len(tail)) + tail
app = FastAPI()

@app.post("/v1/chat/completions")
async def stream(body: dict):
    async def chunks():
        for _ in range(num_chunks):
            yield chunk
            if by_turns:
                await asyncio.sleep(0)
        yield b"data: [DONE]\\n\\n"
    return StreamingResponse(chunks(), media_type="text/event-stream")

listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])
"""
DRY_RUN, BARE, BARE_AT_ONCE = "mini-infer dry run", "bare FastAPI", "bare, an answer at once"
PROMPT = "How do you serve a great many streams?"


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_server_parser(__doc__)
    parser.add_argument("--streams", type=positive, default=512, help="concurrent ones")
    parser.add_argument("--tokens", type=positive, default=256, help="of each stream")
    arguments = parse_quick(parser, argv, streams=16, tokens=16)
    arguments.dry_run = True  # it is the server that is measured, not a model
    jobs = [Job(f"{PROMPT} {row}", arguments.tokens) for row in range(arguments.streams)]
    rows: dict[str, list[dict[str, float]]] = {DRY_RUN: [], BARE: [], BARE_AT_ONCE: []}
    num_errors = 0
    size = 0
    for _ in range(arguments.repeats):
        for name in rows:
            command = dry_run_command(arguments.streams)
            if name != DRY_RUN:
                numbers = (arguments.tokens, size, int(name == BARE))
                command = [sys.executable, "-c", BARE_SERVER, *map(str, numbers)]
            with started(command) as server:
                records, figures = run_loop(measure(server, jobs))
            num_errors += sum(count_errors(records).values())
            print(f"  {name}: {figures['tok/s']:.0f} tok/s", file=sys.stderr)
            rows[name].append(figures)
            if name == DRY_RUN:
                size = round(figures["bytes a chunk"])
    medians = {
        name: {key: median([run[key] for run in runs]) for key in runs[0]}
        for name, runs in rows.items()
    }
    report = Report(
        "serving_load",
        f"{arguments.streams} streams at once of {arguments.tokens} tokens each",
        describe_servers(
            arguments,
            streams=arguments.streams,
            tokens=arguments.tokens,
        ),
    )
    # Of the runs beside each other: a machine that others use is not equally fast for long.
    ratios = [
        ours["tok/s"] / bare["tok/s"] for ours, bare in zip(rows[DRY_RUN], rows[BARE], strict=True)
    ]
    for name, found in medians.items():
        row: dict[str, Value] = {"server": name, **found}
        report.rows.append(row)
    report.bars = [
        Bar("token rate / bare FastAPI's, of each repeat", median(ratios), at_least=0.6),
        Bar("errors", float(num_errors), at_most=0),
    ]
    report.samples = {**rows, "ratios": ratios}
    report.finish(arguments.output)


def dry_run_command(num_streams: int) -> list[str]:
    return mini_infer_server(
        "--dry-run", "--max-num-seqs", num_streams, "--max-num-queued", 2 * num_streams
    )


async def measure(
    server: RunningServer, jobs: Sequence[Job]
) -> tuple[list[Record], dict[str, float]]:
    """All jobs at once, after a few that warm up and tell how large a chunk is."""
    target = Target(server.url, "chat", {"temperature": 0, "ignore_eos": True})
    async with open_session() as session:
        size = await bytes_a_chunk(session, target, jobs[0])
        await send_all(session, target, jobs[:8])
        cpu_seconds = server.cpu_seconds()
        records = await send_all(session, target, jobs)
        cpu_seconds = server.cpu_seconds() - cpu_seconds
    start = min(record.start for record in records)
    end = max(record.start + record.latency for record in records)
    num_pieces = sum(record.num_output_tokens for record in records)
    ttfts = samples_of(records, "ttft")
    gaps = samples_of(records, "itl")
    return records, {
        "tok/s": num_pieces / (end - start),
        "median TTFT ms": percentile(ttfts, 50),
        "p99 TTFT ms": percentile(ttfts, 99),
        "mean ITL ms": fmean(gaps) if gaps else 0.0,
        "p99 ITL ms": percentile(gaps, 99) if gaps else 0.0,
        "CPU us a token": 1e6 * cpu_seconds / num_pieces,
        "server MiB": server.resident_bytes() / 2**20,
        "bytes a chunk": size,
    }


async def bytes_a_chunk(session: Any, target: Target, job: Job) -> float:
    """Of the chunks that carry text; the other ones are few."""
    async with session.post(target.url, json=target.body(job)) as response:
        events = (await response.read()).split(b"\n\n")
    return fmean(len(event) + 2 for event in events if b'"content":"' in event)


if __name__ == "__main__":
    main()
