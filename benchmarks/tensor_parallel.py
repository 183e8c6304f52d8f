"""A model on one rank and on several: throughput, and whether the text is the same.

On GPUs every rank has one of its own. On a CPU ranks share the cores, and what is measured is what
it costs to be several: a ratio of 1 would be free.

    mini-infer bench tensor_parallel --sizes 1 3
    mini-infer bench tensor_parallel --model benchmarks/models/qwen2.5-7b --load-format dummy
"""

from collections.abc import Sequence

from client import Job
from gpu_measure import warm_up
from gpu_workloads import BATCHES, MIXED, Sizes
from harness import (
    Bar,
    Report,
    Value,
    describe,
    make_parser,
    median,
    open_engine,
    parse,
    positive,
    run,
)

from mini_infer import LLM, SamplingParams

GPU_BARS = {"batch 1": 400.0, "batch 32": 7000.0, MIXED: 20000.0, "prefill": 84000.0}
"""Tokens a second of Qwen2.5-7B on two H200s; of prefill, those of the prompts."""
BAR_MODEL, BAR_CARD, BAR_SIZE = "qwen2.5-7b", "H200", 2
PREFILL = "prefill"
WARM_BATCHES = (1, 8, 32)
Outputs = list[list[int]]


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
    rates: dict[tuple[int, str], list[float]] = {}
    texts: dict[tuple[int, str], Outputs] = {}
    report = Report("tensor_parallel", "one model on one rank and on several", {})
    for size in arguments.sizes:
        with open_engine(
            arguments, tensor_parallel_size=size, max_model_len=arguments.max_model_len
        ) as llm:
            config = llm.engine.config
            sizes = Sizes(config.model_config.vocab_size, arguments.shrink)
            warm_up(llm, WARM_BATCHES)
            for name in arguments.workloads:
                jobs = sizes.mixed() if name == MIXED else sizes.batch(name, arguments.seed)
                for _ in range(arguments.repeats):
                    llm.engine.reset_prefix_cache()
                    seconds, outputs = _greedy(llm, jobs)
                    rates.setdefault((size, name), []).append(_num_tokens(name, jobs) / seconds)
                    texts[size, name] = outputs
            report.setup = describe(
                arguments, config, cache="empty before each run", divided_by=arguments.shrink
            )
    for name in arguments.workloads:
        report.rows += [
            _row(name, size, arguments.sizes[0], rates, texts) for size in arguments.sizes
        ]
    report.notes.append(
        "tok/s: generated, of prefill those of the prompts; same text: requests with the greedy "
        f"tokens of the first row, {arguments.sizes[0]} ranks (in float32, rounding aside, all)"
    )
    gpu = str(report.setup["machine"].get("gpu"))
    if BAR_CARD in gpu and BAR_MODEL in arguments.model and arguments.shrink == 1:
        for name, bar in GPU_BARS.items():
            value = rates.get((BAR_SIZE, name))
            found = None if value is None else median(value)
            report.bars.append(Bar(f"{BAR_SIZE} ranks, {name}: tok/s", found, bar))
    report.samples = {f"{name}, {size} ranks": found for (size, name), found in rates.items()}
    report.finish(arguments.output)


def _greedy(llm: LLM, jobs: Sequence[Job]) -> tuple[float, Outputs]:
    now = llm.engine.events.now
    params = [
        SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True)
        for job in jobs
    ]
    started = now()
    outputs = llm.generate([job.prompt_token_ids for job in jobs], params, use_tqdm=False)
    return now() - started, [output.outputs[0].token_ids for output in outputs]


def _num_tokens(name: str, jobs: Sequence[Job]) -> int:
    if name == PREFILL:
        return sum(len(job.prompt_token_ids) for job in jobs)
    return sum(job.num_output_tokens for job in jobs)


def _row(
    name: str,
    size: int,
    first: int,
    rates: dict[tuple[int, str], list[float]],
    texts: dict[tuple[int, str], Outputs],
) -> dict[str, Value]:
    rate, ours, theirs = median(rates[size, name]), texts[size, name], texts[first, name]
    same = sum(mine == other for mine, other in zip(ours, theirs, strict=True))
    return {
        "workload": name,
        "ranks": size,
        "tok/s": rate,
        f"of {first}": rate / median(rates[first, name]),
        "same text": f"{same} of {len(ours)}",
    }


if __name__ == "__main__":
    run(main)
