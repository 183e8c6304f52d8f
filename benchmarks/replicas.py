"""Routers of replicas on a recorded trace: hit rate, balance, and time to first token of each.

The trace is replayed in simulated time on the real schedulers, KV caches and routers, without a
model and without HTTP (``replica_simulation.py``), so it takes minutes instead of an hour, and is
the same on every machine. What a step takes is a model: its tokens at ``--prefill-rate``, and
``--step-ms`` at least. The defaults are about those of a 7B model on a GPU of 141 GB.

    mini-infer bench replicas --trace mooncake_conversation_trace.jsonl.gz
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import Bar, Report, describe_run, percentile, positive, run
from replica_simulation import Outcome, Simulation, StepTime

from mini_infer.cli.load.trace import BLOCK_TOKENS, TracedRequest, read_trace
from mini_infer.runtime.resolve import resolve_core
from mini_infer.runtime.routing.router import load_router

HIT_RATE_BAR = 1.5
BALANCE_BAR = 1.1
BASELINE, CLAIM = "round_robin", "prefix_aware"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    requests = requests_of(arguments)
    num_blocks = max(1, arguments.kv_tokens // BLOCK_TOKENS)
    config, _ = resolve_core(
        {
            "dry_run": True,
            "block_size": BLOCK_TOKENS,
            "num_kv_blocks": num_blocks,
            "max_num_seqs": arguments.max_num_seqs,
            "max_num_batched_tokens": arguments.max_num_batched_tokens,
        }
    )
    step_time = StepTime(arguments.step_ms / 1e3, 1 / arguments.prefill_rate)
    outcomes: dict[str, Outcome] = {}
    for name in arguments.routers:
        router = load_router(name)
        simulation = Simulation(config, num_blocks, arguments.replicas, router, step_time)
        outcomes[name] = simulation.run(requests, arguments.speed)
    report = Report("replicas", "routers of replicas, in simulated time", setup_of(arguments))
    report.rows = [row(name, outcome) for name, outcome in outcomes.items()]
    report.samples = {
        name: [vars(replica) for replica in outcome.replicas] for name, outcome in outcomes.items()
    }
    report.bars = bars(outcomes)
    report.notes = [
        f"a cache without a limit that all replicas share would find {shared_rate(requests):.1%}",
        "schedulers, KV caches, routers and events are the real ones; what a step takes is a model",
        "answers are as long as the trace says, of invented tokens: the next turn of a talk finds "
        "its last prompt in a cache, and not its last answer",
    ]
    report.finish(arguments.output)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--trace", type=Path, help="Mooncake's, JSON lines; by default conversations are invented"
    )
    parser.add_argument("--requests", type=positive, help="only the first ones")
    parser.add_argument("--replicas", type=positive, default=8)
    parser.add_argument(
        "--routers", nargs="+", default=[BASELINE, "least_loaded", CLAIM], help="also module:Class"
    )
    parser.add_argument("--speed", type=float, default=8.0, help="times as fast as recorded")
    parser.add_argument(
        "--kv-tokens", type=positive, default=1_900_000, help="that a replica's KV cache holds"
    )
    parser.add_argument("--prefill-rate", type=float, default=60_000.0, help="tokens a second")
    parser.add_argument("--step-ms", type=float, default=6.0, help="what a step takes at least")
    parser.add_argument("--max-num-seqs", type=positive, default=256)
    parser.add_argument("--max-num-batched-tokens", type=positive, default=8192)
    parser.add_argument("--seed", type=int, default=0, help="of invented conversations")
    parser.add_argument("--quick", action="store_true", help="few requests: does it work at all?")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args(argv)
    if arguments.quick and arguments.requests is None:
        arguments.requests = 400
    arguments.repeats = 1  # simulated time is the same each time
    return arguments


def requests_of(arguments: argparse.Namespace) -> list[TracedRequest]:
    if arguments.trace is None:
        endless = conversations(random.Random(arguments.seed))
        return list(itertools.islice(endless, arguments.requests or 4000))
    return read_trace(arguments.trace)[: arguments.requests]


def conversations(rng: random.Random) -> Iterator[TracedRequest]:
    """Invented ones: 64 at a time, of one to eight turns, of which each sends all before it again;
    all begin with the same block. A request every 300 ms."""
    block_ids = itertools.count(1)
    talks: list[list[int]] = []
    for number in itertools.count():
        talks = [talk for talk in talks if rng.random() > 1 / 64 / 4]
        while len(talks) < 64:
            talks.append([0])
        talk = rng.choice(talks)
        talk += itertools.islice(block_ids, rng.randint(1, 8))
        num_tokens = len(talk) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        yield TracedRequest(0.3 * number, num_tokens, rng.randint(50, 600), tuple(talk))


def setup_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": "none: steps in simulated time",
        "weights": "no",
        "dtype": "none",
        "lengths": {
            "trace": arguments.trace.name if arguments.trace else "invented conversations",
            "requests": arguments.requests or "all",
            "replicas": arguments.replicas,
            "speed": arguments.speed,
            "kv_tokens_a_replica": arguments.kv_tokens,
            "tokens_a_block": BLOCK_TOKENS,
            "prefill_tokens_a_second": arguments.prefill_rate,
            "ms_a_step_at_least": arguments.step_ms,
        },
        "prefix cache": "empty at first",
        **describe_run(arguments),
    }


def row(name: str, outcome: Outcome) -> dict[str, Any]:
    waits = [1e3 * seconds for seconds in outcome.times_to_first_token]
    busy = sum(replica.busy_seconds for replica in outcome.replicas)
    return {
        "router": name,
        "hit rate %": 100 * outcome.hit_rate,
        "requests max/mean": imbalance(outcome, "num_requests"),
        "computed tokens max/mean": imbalance(outcome, "num_computed_tokens"),
        "requests variation": variation(outcome, "num_requests"),
        "computed tokens variation": variation(outcome, "num_computed_tokens"),
        "busy %": 100 * busy / len(outcome.replicas) / outcome.seconds,
        "mean TTFT ms": statistics.mean(waits),
        "p99 TTFT ms": percentile(waits, 99),
    }


def imbalance(outcome: Outcome, field: str) -> float:
    """The most of any replica over the mean: 1 where all have the same."""
    values = [getattr(replica, field) for replica in outcome.replicas]
    return max(values) / statistics.mean(values)


def variation(outcome: Outcome, field: str) -> float:
    """Standard deviation over mean."""
    values = [getattr(replica, field) for replica in outcome.replicas]
    return statistics.pstdev(values) / statistics.mean(values)


def bars(outcomes: dict[str, Outcome]) -> list[Bar]:
    """What the claim says: more hits, at the same balance. A ratio to the baseline each."""
    if not {BASELINE, CLAIM} <= outcomes.keys():
        return []
    base, claim = outcomes[BASELINE], outcomes[CLAIM]
    ratio = claim.hit_rate / base.hit_rate if base.hit_rate else None
    found = [Bar(f"hit rate, {CLAIM} over {BASELINE}", ratio, HIT_RATE_BAR)]
    for field in ("num_requests", "num_computed_tokens"):
        what = field.removeprefix("num_").replace("_", " ")
        value = imbalance(claim, field) / imbalance(base, field)
        found.append(Bar(f"{what} max/mean, the same", value, at_most=BALANCE_BAR))
    return found


def shared_rate(requests: Sequence[TracedRequest]) -> float:
    """Share of prompt tokens that one cache without a limit would find."""
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        known = list(itertools.takewhile(seen.__contains__, request.block_ids))
        found += min(len(known) * BLOCK_TOKENS, request.num_prompt_tokens - 1)
        total += request.num_prompt_tokens
        seen.update(request.block_ids)
    return found / total


if __name__ == "__main__":
    run(main)
