"""A model in one stage and in several: throughput, and whether the text is the same.

Each number of stages runs twice: with a step in every stage, and with one step at a time, which all
stages but one have to wait for. On GPUs every stage has one of its own. On a CPU stages share the
cores: measure there with ``--threads 1``, which each of them gets.

    mini-infer bench pipeline_parallel --stages 1 2 --threads 1
    mini-infer bench pipeline_parallel --model benchmarks/models/qwen2.5-7b --load-format dummy
"""

from collections.abc import Sequence

from gpu_workloads import BATCHES, MIXED
from harness import Report, describe, make_parser, open_engine, parse, positive, run
from rank_scaling import PREFILL, Scaling

GPU_BAR = 1.7
"""Times one GPU's throughput that two have, of Qwen2.5-7B with 256 requests."""
BAR_MODEL, BAR_CARD = "qwen2.5-7b", "H200"


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--stages", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--size", type=positive, default=1, help="ranks in each stage")
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
    report = Report("pipeline_parallel", "one model in one stage and in several", {})
    engines = dict(_engines(arguments.stages))
    for label, options in engines.items():
        with open_engine(
            arguments,
            tensor_parallel_size=arguments.size,
            max_model_len=arguments.max_model_len,
            **options,
        ) as llm:
            scaling.measure(
                label,
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
    first = next(iter(engines))
    for name in arguments.workloads:
        report.rows += [
            {"workload": name, "stages": label, **scaling.row(name, label, first)}
            for label in engines
        ]
    report.notes.append(
        "tok/s: generated, of prefill those of the prompts; same text: requests with the greedy "
        f"tokens of the first row, {first} (in float32 all)"
    )
    gpu = str(report.setup["machine"].get("gpu"))
    if BAR_CARD in gpu and BAR_MODEL in arguments.model and arguments.shrink == 1:
        report.bars.append(scaling.bar(MIXED, "2", "1", GPU_BAR))
    report.samples = {
        f"{name}, {label} stages": found for (label, name), found in scaling.rates.items()
    }
    report.finish(arguments.output)


def _engines(counts: Sequence[int]) -> list[tuple[str, dict[str, int]]]:
    """What each is called, and its options."""
    engines: list[tuple[str, dict[str, int]]] = []
    for count in counts:
        options = {"pipeline_parallel_size": count}
        if count > 1:
            engines.append((f"{count}, a step at a time", options | {"depth": 1}))
        engines.append((str(count), options))
    return engines


if __name__ == "__main__":
    run(main)
