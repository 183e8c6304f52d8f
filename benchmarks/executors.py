"""The same ranks under each executor: does it matter who started them?

All engines are open at once and take turns, so that a busy moment meets all of them. On GPUs give
``--engine gpu_memory_utilization=0.4``, or one executor at a time.

    mini-infer bench executors --stages 2 --threads 2
    mini-infer bench executors --executors local mp ray --stages 1
"""

import contextlib
import importlib.util
from collections.abc import Sequence

from gpu_workloads import BATCHES, MIXED
from harness import Report, describe, make_parser, open_engine, parse, positive, run
from rank_scaling import Scaling


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--executors",
        nargs="+",
        choices=("local", "mp", "ray"),
        default=["mp", "ray"] if importlib.util.find_spec("ray") else ["mp"],
    )
    parser.add_argument("--stages", type=positive, default=2, help="of the pipeline")
    parser.add_argument("--size", type=positive, default=1, help="ranks in each stage")
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=(*BATCHES, MIXED),
        default=["batch 1", "batch 8"],
        help="requests, tokens in and out, of gpu_throughput",
    )
    parser.add_argument("--shrink", type=positive, default=4, help="divide lengths and counts")
    parser.add_argument("--max-model-len", type=positive, default=1024)
    arguments = parse(parser, argv, shrink=32)
    scaling = Scaling()
    report = Report("executors", "the same ranks, started by different executors", {})
    first = arguments.executors[0]
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                open_engine(
                    arguments,
                    distributed_executor_backend=name,
                    pipeline_parallel_size=arguments.stages,
                    tensor_parallel_size=arguments.size,
                    max_model_len=arguments.max_model_len,
                )
            )
            for name in arguments.executors
        }
        for _ in range(arguments.repeats):
            for name, llm in engines.items():
                scaling.measure(name, llm, arguments.workloads, 1, arguments.shrink, arguments.seed)
        report.setup = describe(
            arguments,
            engines[first].engine.config,
            cache="empty before each run",
            divided_by=arguments.shrink,
        )
    for name in arguments.workloads:
        report.rows += [
            {"workload": name, "executor": executor, **scaling.row(name, executor, first)}
            for executor in engines
        ]
    report.notes.append(
        "tok/s: generated; same text: requests with the greedy tokens of the first row"
    )
    report.samples = {
        f"{name}, {executor}": found for (executor, name), found in scaling.rates.items()
    }
    report.finish(arguments.output)


if __name__ == "__main__":
    run(main)
