"""mini-infer against Hugging Face generate, and llama.cpp where it is installed, in one run.

Everybody gets the same weights and token ids and all cores, and is greedy to the full length. They
take turns: each repeat loads, warms up, times and frees one after another, so that a machine that
slows down slows all of them, and never two models are in memory.

    mini-infer bench vs_huggingface --output benchmarks/results/vs_huggingface.json
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from client import Job, random_prompt, serve, warm_up
from harness import Bar, Report, describe, make_parser, median, open_engine, parse, positive, run

from mini_infer.core.errors import MiniInferError
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.model_files import load_model_config, locate_model
from mini_infer.modeling.pull import pull

OURS, OURS_F32 = "mini-infer", "mini-infer float32"
HF_F32, HF_BF16 = "HF float32", "HF bfloat16"
LLAMA_CPP = "llama.cpp F16"
CONTENDERS = (OURS, HF_F32, OURS_F32, HF_BF16, LLAMA_CPP)
STATIC_BATCH = 8
"""Hugging Face's batches of the mixed workload."""


@dataclass(frozen=True)
class Workloads:
    """The same for every contender and every repeat."""

    batches: dict[int, list[Job]]
    prefill: Job
    mixed: list[Job]

    @property
    def num_mixed_tokens(self) -> int:
        """Output tokens that somebody asked for; what padding makes beyond them does not count."""
        return sum(job.num_output_tokens for job in self.mixed)


@dataclass
class Results:
    """Tokens per second, by workload and contender, one entry a repeat."""

    speeds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    """Each contender's output tokens of the batches, of the last repeat."""

    def add(self, workload: str, contender: str, tokens_per_second: float) -> None:
        self.speeds.setdefault(workload, {}).setdefault(contender, []).append(tokens_per_second)

    def median(self, workload: str, contender: str) -> float | None:
        values = self.speeds.get(workload, {}).get(contender)
        return median(values) if values else None

    def ratio(self, workload: str, ours: str, *peers: str) -> float | None:
        """Ours over the fastest of ``peers``; None where either was not measured."""
        speed = self.median(workload, ours)
        others = [value for peer in peers if (value := self.median(workload, peer))]
        return speed / max(others) if speed and others else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--output-tokens", type=positive, default=128)
    parser.add_argument("--prefill-tokens", type=positive, default=512, help="of one prompt")
    parser.add_argument("--mixed", type=positive, default=32, help="requests of mixed lengths")
    parser.add_argument("--mixed-prompt", type=positive, nargs=2, default=[16, 256])
    parser.add_argument("--mixed-output", type=positive, nargs=2, default=[16, 128])
    parser.add_argument("--llama-batched-bench", help="llama.cpp's program, if not on PATH")
    quick = {"output_tokens": 16, "prefill_tokens": 128, "mixed": 16}
    arguments = parse(parser, argv, batch=[1, 8], mixed_output=[4, 24], **quick)
    if arguments.load_format == "dummy":
        parser.error("others can't load our random weights: name a model that has weights")
    folder = pull(arguments.model)
    config = load_model_config(locate_model(str(folder)))
    work = _workloads(arguments, config.vocab_size)
    results = Results()
    report = Report("vs_huggingface", "output tokens per second; medians", {})
    with ExitStack() as stack:
        llama = _prepare_llama_cpp(arguments, folder, config, stack, report)
        for _ in range(arguments.repeats):
            for contender in arguments.contenders:
                if contender in (OURS, OURS_F32):
                    setup = _run_ours(contender, arguments, work, results)
                    report.setup = report.setup or setup
                elif contender in (HF_F32, HF_BF16):
                    _run_hugging_face(contender, folder, _device(arguments), work, results)
                elif llama is not None:
                    _run_llama_cpp(*llama, arguments, results)
    _fill(report, results)
    report.finish(arguments.output)


def _workloads(arguments: argparse.Namespace, vocab_size: int) -> Workloads:
    rng = random.Random(arguments.seed)

    def jobs(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Job]:
        return [
            Job(random_prompt(rng, vocab_size, rng.randint(*prompt)), rng.randint(*output))
            for _ in range(count)
        ]

    prompt, output = arguments.prompt_tokens, arguments.output_tokens
    return Workloads(
        {size: jobs(size, (prompt, prompt), (output, output)) for size in arguments.batch},
        Job(random_prompt(rng, vocab_size, arguments.prefill_tokens), 1),
        jobs(arguments.mixed, arguments.mixed_prompt, arguments.mixed_output),
    )


def _run_ours(
    contender: str, arguments: argparse.Namespace, work: Workloads, results: Results
) -> dict[str, object]:
    options: dict[str, object] = {"dtype": "float32"} if contender == OURS_F32 else {}
    longest = max(
        len(job.prompt_token_ids) + job.num_output_tokens
        for job in [*work.mixed, work.prefill, *(jobs[0] for jobs in work.batches.values())]
    )
    with open_engine(
        arguments,
        max_model_len=longest,
        max_num_seqs=max(len(work.mixed), *work.batches),
        **options,
    ) as llm:
        warm_up(llm, work.batches[max(work.batches)])
        results.tokens[contender] = []
        for size, jobs in work.batches.items():
            client = serve(llm, jobs)
            results.add(f"batch {size}", contender, client.trace.output_tokens_per_second)
            results.tokens[contender] += [
                client.outputs[name].outputs[0].token_ids for name in client.trace.queued
            ]
        prefill_seconds = serve(llm, [work.prefill]).trace.seconds
        results.add("prefill", contender, len(work.prefill.prompt_token_ids) / prefill_seconds)
        mixed = serve(llm, work.mixed)
        results.add("mixed", contender, mixed.trace.output_tokens_per_second)
        return describe(
            arguments,
            llm.engine.config,
            cache="on, empty before each workload, no two prompts alike",
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            prefill_tokens=arguments.prefill_tokens,
            mixed_requests=arguments.mixed,
            mixed_prompt="{}-{}".format(*arguments.mixed_prompt),
            mixed_output="{}-{}".format(*arguments.mixed_output),
        )


def _device(arguments: argparse.Namespace) -> str:
    import torch

    if arguments.device != "auto":
        return str(arguments.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _run_hugging_face(
    contender: str, folder: Path, device: str, work: Workloads, results: Results
) -> None:
    from peer_hugging_face import HuggingFace

    peer = HuggingFace(folder, contender.split()[1], device)
    peer.generate([Job(jobs[0].prompt_token_ids, 4) for jobs in work.batches.values()])
    results.tokens[contender] = []
    for size, jobs in work.batches.items():
        seconds, rows = peer.generate(jobs)
        results.add(f"batch {size}", contender, sum(map(len, rows)) / seconds)
        results.tokens[contender] += rows
    seconds, _ = peer.generate([work.prefill])
    results.add("prefill", contender, len(work.prefill.prompt_token_ids) / seconds)
    seconds = peer.generate_in_batches(work.mixed, STATIC_BATCH)
    results.add("mixed", contender, work.num_mixed_tokens / seconds)
    peer.close()


def _prepare_llama_cpp(
    arguments: argparse.Namespace,
    folder: Path,
    config: ModelConfig,
    stack: ExitStack,
    report: Report,
) -> tuple[str, Path] | None:
    """The program and a GGUF to run it on; None, and a line in the report, where it can't be."""
    if LLAMA_CPP not in arguments.contenders:
        return None
    try:
        from peer_llama_cpp import BINARY, find_binary, write_f16_gguf
    except ImportError as error:
        report.notes.append(f"llama.cpp: skipped, the conversion needs {error.name}")
        return None
    binary = find_binary(arguments.llama_batched_bench)
    if binary is None:
        report.notes.append(
            f"llama.cpp: skipped, {arguments.llama_batched_bench or BINARY} is not installed"
        )
        return None
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "f16.gguf"
    try:
        write_f16_gguf(folder, config, path)
    except MiniInferError as error:
        report.notes.append(f"llama.cpp: skipped, {error}")
        return None
    return binary, path


def _run_llama_cpp(
    binary: str, path: Path, arguments: argparse.Namespace, results: Results
) -> None:
    from peer_llama_cpp import batched_bench

    num_output = arguments.output_tokens
    for line in batched_bench(
        binary, path, arguments.batch, arguments.prompt_tokens, num_output, arguments.threads
    ):
        results.add(f"batch {line['pl']}", LLAMA_CPP, line["pl"] * num_output / line["t"])
    (line,) = batched_bench(binary, path, [1], arguments.prefill_tokens, 1, arguments.threads)
    results.add("prefill", LLAMA_CPP, line["pp"] / line["t"])


def _fill(report: Report, results: Results) -> None:
    report.samples = results.speeds
    for workload in results.speeds:
        row: dict[str, str | int | float | None] = {"workload": workload}
        row |= {name: results.median(workload, name) for name in CONTENDERS}
        row["/ better HF"] = results.ratio(workload, OURS, HF_F32, HF_BF16)
        row["float32 / float32"] = results.ratio(workload, OURS_F32, HF_F32)
        row["/ llama.cpp"] = results.ratio(workload, OURS, LLAMA_CPP)
        report.rows.append(row)
    hugging_face = (HF_F32, HF_BF16)
    report.bars += [
        Bar("batch 1 / better HF", results.ratio("batch 1", OURS, *hugging_face), 2.0),
        Bar("batch 8 / better HF", results.ratio("batch 8", OURS, *hugging_face), 2.0),
        Bar("batch 8, float32 / HF float32", results.ratio("batch 8", OURS_F32, HF_F32), 1.3),
        Bar("mixed / better HF", results.ratio("mixed", OURS, *hugging_face), 4.0),
        Bar("batch 8 / llama.cpp F16", results.ratio("batch 8", OURS, LLAMA_CPP), 0.7),
    ]
    if OURS_F32 in results.tokens and HF_F32 in results.tokens:
        pairs = list(zip(results.tokens[OURS_F32], results.tokens[HF_F32], strict=True))
        same = sum(ours == theirs for ours, theirs in pairs)
        report.notes.append(f"identical float32 outputs: {same} of {len(pairs)}")


if __name__ == "__main__":
    run(main)
