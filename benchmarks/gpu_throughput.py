"""One model on one GPU: throughput and latency, beside the card's limit and other engines.

Random weights, temperature 0.6, fixed output lengths, all through ``LLM.generate``. One engine
serves all workloads; then Hugging Face's ``generate`` does a few tokens of the smaller ones.

    mini-infer bench gpu_throughput --model benchmarks/models/qwen2.5-7b --output result.json
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from card import measure_card
from client import Job
from gpu_measure import (
    CACHED,
    COLD,
    PROFILED_FROM_START,
    PROFILED_OUTPUT,
    TEMPERATURE,
    Measurements,
    measure,
    rehearse,
    short_jobs,
    timed,
    unit,
    warm_up,
)
from gpu_reference import (
    CARD,
    CONCURRENCY_GAIN,
    KV_WASTE,
    NO_REFERENCE,
    REFERENCES,
    SHARED_PREFIX_FALL,
    Reference,
)
from gpu_workloads import CONCURRENCY, MIXED, WORKLOADS, Sizes
from harness import (
    Bar,
    Report,
    Value,
    bundled_model,
    describe,
    free_memory,
    make_parser,
    open_engine,
    parse,
    positive,
    require_gpu,
    run,
    trace,
)
from limits import Card, ModelCost

MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 4096
WARM_BATCHES = (1, 8, 32, 128, 256)
HUGGING_FACE = {"batch 1": 32, "batch 8": 32, "batch 32": 32}
"""Workload to output tokens: ``generate`` is too slow for all of them."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(load_format="dummy", model=bundled_model("qwen2.5-7b"))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--first-tokens", type=positive, default=5, help="medians are over these")
    parser.add_argument("--shrink", type=positive, default=1, help="divide lengths and counts")
    parser.add_argument("--budget", type=float, default=540, help="seconds; then no new workload")
    parser.add_argument("--no-hugging-face", action="store_true", help="leave that peer out")
    arguments = parse(parser, argv, shrink=8, first_tokens=2)
    require_gpu(arguments.device)
    card = measure_card(arguments.device)
    print(f"{card.name}: {card.summary}", flush=True)
    report = Report("gpu_throughput", "one model on one GPU", {})
    found, sizes = _run_engine(arguments, card, report)
    peers = {} if arguments.no_hugging_face else _run_hugging_face(arguments, sizes, report)
    reference = NO_REFERENCE
    if arguments.shrink == 1 and CARD in card.name:
        reference = REFERENCES.get(Path(arguments.model).name, NO_REFERENCE)
    fill(report, found, peers, reference)
    report.finish(arguments.output)


def _run_engine(
    arguments: argparse.Namespace, card: Card, report: Report
) -> tuple[Measurements, Sizes]:
    started = time.perf_counter()
    with open_engine(
        arguments, traced=False, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN
    ) as llm:
        config = llm.engine.config
        lengths: dict[str, Value] = {}
        if arguments.shrink > 1:
            lengths["divided_by"] = arguments.shrink
        report.setup = describe(
            arguments, config, cache="on, empty before each workload", **lengths
        )
        report.setup["start-up s"] = round(time.perf_counter() - started, 2)
        report.setup["card"] = card.summary
        found = Measurements(card, ModelCost.of(config.model_config))
        sizes = Sizes(config.model_config.vocab_size, arguments.shrink)
        warm_up(llm, WARM_BATCHES)
        for repeat in range(arguments.repeats):
            for name in arguments.workloads:
                if time.perf_counter() - started > arguments.budget:
                    report.notes.append(f"{name}, repeat {repeat + 1}: not run, no time was left")
                    continue
                if repeat == 0:
                    rehearse(llm, name, sizes)
                seed = arguments.seed + repeat
                measure(llm, name, sizes, seed, arguments.first_tokens, found)
        for name in arguments.workloads if arguments.profile is not None else ():
            llm.engine.reset_prefix_cache()
            jobs = short_jobs(name, sizes, PROFILED_OUTPUT)
            skip = 0 if name in PROFILED_FROM_START else None
            with trace(arguments, llm, name, skip):
                timed(llm, jobs)
    return found, sizes


def _run_hugging_face(
    arguments: argparse.Namespace, sizes: Sizes, report: Report
) -> dict[str, float]:
    """Tokens per second by workload; a note where it can't run."""
    from peer_hugging_face import HuggingFace

    free_memory()  # of the engine, which nothing refers to any more
    device = "cuda" if "gpu" in report.setup["machine"] else "cpu"
    peer = HuggingFace(
        Path(arguments.model),
        report.setup["dtype"],
        device,
        random_weights=True,
        temperature=TEMPERATURE,
    )
    speeds = {}
    for name, num_output in HUGGING_FACE.items():
        if name in arguments.workloads:
            jobs = [
                Job(job.prompt_token_ids, min(num_output, job.num_output_tokens))
                for job in sizes.batch(name, arguments.seed)
            ]
            peer.generate([Job(job.prompt_token_ids, 2) for job in jobs])
            seconds, rows = peer.generate(jobs)
            speeds[name] = sum(map(len, rows)) / seconds
            report.notes.append(f"Hugging Face, {name}: {jobs[0].num_output_tokens} tokens out")
    peer.close()
    return speeds


def fill(
    report: Report, found: Measurements, hugging_face: dict[str, float], reference: Reference
) -> None:
    """The table, a row a workload, and the bars."""
    for name in found.seconds:
        shape, figure = found.shapes[name], found.figure(name)
        assert figure is not None
        row: dict[str, Value] = {
            "workload": name,
            "requests": shape.requests,
            "in": shape.tokens_in // shape.requests,
            "out": shape.tokens_out // shape.requests,
            "mini-infer": figure,
            "unit": unit(name),
            "bar": reference.bars.get(name),
            "card's limit": found.limit(name),
            "of limit": found.of_limit(name),
        }
        row |= {peer: figures.get(name) for peer, figures in reference.peers.items()}
        row["Hugging Face"] = hugging_face.get(name)
        report.rows.append(row)
    for name, bound in reference.bars.items():
        kind = "at_most" if unit(name) == "ms" else "at_least"
        report.bars.append(Bar(f"{name}, {unit(name)}", found.figure(name), **{kind: bound}))
    report.bars += _derived_bars(found)
    report.samples = {
        "seconds": found.seconds,
        "limit seconds": found.limits,
        "shapes": {name: asdict(shape) for name, shape in found.shapes.items()},
    }


def _derived_bars(found: Measurements) -> list[Bar]:
    cold, cached = found.figure(COLD), found.figure(CACHED)
    one, eight = (found.figure(f"{CONCURRENCY} {requests}") for requests in (1, 8))
    fall = None if cold is None or cached is None else 100 * (1 - cached / cold)
    gain = None if one is None or eight is None else eight / one
    return [
        Bar("shared prefix: first token falls by %", fall, SHARED_PREFIX_FALL),
        Bar("concurrency 1 to 8: throughput, times", gain, CONCURRENCY_GAIN),
        Bar(f"{MIXED}: KV tokens wasted, %", found.kv_waste, at_most=KV_WASTE),
    ]


if __name__ == "__main__":
    run(main)
