"""A model on one rank and on several: throughput, and whether the text is the same.

On GPUs every rank has one of its own. On a CPU ranks share the cores, and what is measured is what
it costs to be several: a ratio of 1 would be free.

    mini-infer bench tensor_parallel --sizes 1 3
    mini-infer bench tensor_parallel --model benchmarks/models/qwen2.5-7b --load-format dummy
"""

from collections.abc import Sequence

from gpu_workloads import BATCHES, MIXED
from harness import Bar, Report, describe, make_parser, open_engine, parse, positive, run
from rank_scaling import PREFILL, Scaling

GPU_BARS = {"batch 1": 400.0, "batch 32": 7000.0, MIXED: 20000.0, "prefill": 84000.0}
"""Tokens a second of Qwen2.5-7B on two H200s; of prefill, those of the prompts."""
BAR_MODEL, BAR_CARD, BAR_SIZE = "qwen2.5-7b", "H200", 2


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", type=positive, nargs="+", default=[1, 3], help="ranks")
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=(*BATCHES, MIXED),
        default=["batch 1", "batch 8", PREFILL],
        help="requests, tokens in and out, of gpu_throughput",
    )
    parser.add_argument("--shrink", type=positive, default=4, help="divide lengths and counts")
    parser.add_argument("--max-model-len", type=positive, default=4096)
    arguments = parse(parser, argv, shrink=32)
    scaling = Scaling()
    report = Report("tensor_parallel", "one model on one rank and on several", {})
    for size in arguments.sizes:
        with open_engine(
            arguments, tensor_parallel_size=size, max_model_len=arguments.max_model_len
        ) as llm:
            scaling.measure(
                str(size),
                llm,
                arguments.workloads,
                arguments.repeats,
                arguments.shrink,
                arguments.seed,
            )
            report.setup = describe(
                arguments,
                llm.engine.config,
                cache="empty before each run",
                divided_by=arguments.shrink,
            )
    first = str(arguments.sizes[0])
    for name in arguments.workloads:
        report.rows += [
            {"workload": name, "ranks": size, **scaling.row(name, str(size), first)}
            for size in arguments.sizes
        ]
    report.notes.append(
        "tok/s: generated, of prefill those of the prompts; same text: requests with the greedy "
        f"tokens of the first row, {first} ranks (in float32, rounding aside, all)"
    )
    gpu = str(report.setup["machine"].get("gpu"))
    if BAR_CARD in gpu and BAR_MODEL in arguments.model and arguments.shrink == 1:
        for name, bar in GPU_BARS.items():
            found = scaling.rate(str(BAR_SIZE), name)
            report.bars.append(Bar(f"{BAR_SIZE} ranks, {name}: tok/s", found, bar))
    report.samples = {
        f"{name}, {size} ranks": found for (size, name), found in scaling.rates.items()
    }
    report.finish(arguments.output)


if __name__ == "__main__":
    run(main)
