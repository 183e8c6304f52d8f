"""Every benchmark, one after another; with --quick only to see that each works.

mini-infer bench suite --output-folder benchmarks/results
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
START_UP, REPLICAS = "startup", "replicas"
"""These have no engine, so they take none of the options of ``harness.make_parser``."""
BENCHMARKS = (
    START_UP,
    "continuous_batching",
    "chunked_prefill",
    "prefix_cache",
    "dtype_agreement",
    "host_overhead",
    "structured_output",
    "speculative",
    "speculative_batches",
    "tensor_parallel",
    "pipeline_parallel",
    "executors",
    "vs_huggingface",
    "serving_load",
    "serving_overhead",
    "serving_fairness",
    REPLICAS,
    "soak",
)

GPU_BENCHMARKS = (
    "gpu_kernels",
    "gpu_products",
    "gpu_throughput",
    "gpu_memory",
    "cuda_graphs",
    "speculative_forced",
    "startup_gpu",
)
"""Not in the suite, which runs anywhere: each takes minutes of a GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Other options, such as --model, go to every benchmark that has an engine.",
    )
    parser.add_argument("--quick", action="store_true", help="one repeat, fewer tokens")
    parser.add_argument("--output-folder", type=Path, help="write NAME.json here")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    arguments, shared = parser.parse_known_args(argv)
    failed = []
    for name in arguments.only:
        options = _options(name, arguments.quick, shared)
        if arguments.output_folder:
            arguments.output_folder.mkdir(parents=True, exist_ok=True)
            options += ["--output", str(arguments.output_folder / f"{name}.json")]
        print(f"== {name}", flush=True)
        if subprocess.call([sys.executable, str(FOLDER / f"{name}.py"), *options]):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _options(name: str, quick: bool, shared: Sequence[str]) -> list[str]:
    if name == START_UP:
        return ["--runs", "1"] if quick else []
    return [*(shared if name != REPLICAS else []), *(["--quick"] if quick else [])]


if __name__ == "__main__":
    sys.exit(main())
