"""CUDA graphs and overlap, each on and off: time per token of one request on a GPU.

Eager, a step waits for the host to launch its kernels one by one; a graph launches all of them at
once. At depth 1 the device waits while the host takes a step in and plans the next; at depth 2 it
does not.

    mini-infer bench cuda_graphs --output benchmarks/results/cuda_graphs.json
"""

from collections.abc import Sequence

from card import measure_card
from client import Job
from gpu_measure import timed
from gpu_workloads import Sizes
from harness import (
    Bar,
    Report,
    bundled_model,
    describe,
    make_parser,
    median,
    open_engine,
    parse,
    positive,
    require_gpu,
    run,
)
from limits import ModelCost, workload_seconds

FALL_BAR = 60.0
VARIANTS = {(True, 1): "eager", (True, 2): "eager", (False, 1): "graph", (False, 2): "graph"}
"""(enforce_eager, depth) to what launches the kernels."""
WORKLOAD = "batch 1"
MAX_MODEL_LEN = 512


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(load_format="dummy", model=bundled_model("qwen2.5-1.5b"))
    parser.add_argument("--shrink", type=positive, default=1, help="divide the lengths")
    arguments = parse(parser, argv, shrink=8)
    require_gpu(arguments.device)
    card = measure_card(arguments.device)
    seconds: dict[tuple[bool, int], list[float]] = {}
    report = Report("cuda_graphs", "time per token of one request", {})
    jobs: list[Job] = []
    limit = 0.0
    for eager, depth in VARIANTS:
        with open_engine(
            arguments,
            enforce_eager=eager,
            depth=depth,
            max_num_seqs=1,
            max_model_len=MAX_MODEL_LEN,
        ) as llm:
            config = llm.engine.config
            sizes = Sizes(config.model_config.vocab_size, arguments.shrink)
            jobs = sizes.batch(WORKLOAD, arguments.seed)
            limit = workload_seconds(card, ModelCost.of(config.model_config), jobs)
            timed(llm, [Job(jobs[0].prompt_token_ids, 4)])
            times = []
            for _ in range(arguments.repeats):
                llm.engine.reset_prefix_cache()
                times.append(timed(llm, jobs)[0])
            seconds[eager, depth] = times
            (job,) = jobs
            report.setup = describe(
                arguments,
                config,
                cache="empty before each run",
                prompt_tokens=len(job.prompt_token_ids),
                output_tokens=job.num_output_tokens,
            )
            report.setup["card"] = card.summary
    (job,) = jobs
    count = job.num_output_tokens
    slowest = median(seconds[True, 1])
    for (eager, depth), kind in VARIANTS.items():
        spent = median(seconds[eager, depth])
        report.rows.append(
            {
                "launched": kind,
                "depth": depth,
                "ms a token": 1000 * spent / count,
                "tok/s": count / spent,
                "of eager, depth 1": spent / slowest,
                "of limit": limit / spent,
            }
        )
    fall = 100 * (1 - median(seconds[False, 2]) / slowest)
    report.bars.append(Bar("graphs and overlap: time per token falls by %", fall, FALL_BAR))
    report.samples = {f"{kind}, depth {key[1]}": seconds[key] for key, kind in VARIANTS.items()}
    report.finish(arguments.output)


if __name__ == "__main__":
    run(main)
