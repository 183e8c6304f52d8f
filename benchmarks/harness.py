"""What all benchmarks share: options, the description of a run, tables, bars and JSON."""

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mini_infer import LLM
from mini_infer.core.engine_config import DEFAULT_MODEL, EngineConfig
from mini_infer.core.errors import InvalidConfigError, MiniInferError

if TYPE_CHECKING:
    from step_profiler import StepProfiler

INTERRUPTED = 130
"""How a shell calls a command's end by Ctrl-C."""
PACKAGES = ("mini-infer", "torch", "numpy", "transformers", "triton", "llama-cpp-python")
Value = str | int | float | None
_engine_numbers = itertools.count(1)


def make_parser(doc: str | None, *, repeats: int = 3) -> argparse.ArgumentParser:
    """The options that every benchmark has; a script adds its own lengths and counts."""
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for mini-infer serve")
    parser.add_argument("--dtype", default="auto", help="of the weights, or auto")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--threads", type=positive, help="of torch; by default all cores")
    parser.add_argument("--repeats", type=positive, default=repeats, help="medians are over these")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    parser.add_argument(
        "--quick", action="store_true", help="one repeat, fewer tokens: does it work at all?"
    )
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--engine",
        type=engine_option,
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="any option of the engine, such as depth=1; wins over the benchmark's own",
    )
    profiling = parser.add_argument_group("profiling", "it slows down what it records")
    kind = profiling.add_mutually_exclusive_group()
    kind.add_argument("--profile", type=Path, metavar="FOLDER", help="write traces for Perfetto")
    kind.add_argument(
        "--nvtx", action="store_true", help="name steps and layers for Nsight Systems"
    )
    profiling.add_argument("--profile-skip", type=int, default=32, help="steps before a trace")
    profiling.add_argument("--profile-steps", type=positive, default=8, help="steps in a trace")
    return parser


def positive(text: str) -> int:
    """argparse type: a whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def bundled_model(name: str) -> str:
    """Where the configuration of a model to measure is, from the working folder."""
    return os.path.relpath(Path(__file__).parent / "models" / name)


def engine_option(text: str) -> tuple[str, Any]:
    """argparse type: an option of ``EngineConfig`` and its value, as JSON or as plain text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not OPTION=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **quick: Any
) -> argparse.Namespace:
    """Parses, and sets torch's threads. With ``--quick``, ``quick`` replaces the defaults."""
    arguments = parser.parse_args(argv)
    if arguments.quick:
        parser.set_defaults(repeats=1, **quick)  # what the user typed still wins
        arguments = parser.parse_args(argv)
    arguments.threads = arguments.threads or num_cores()
    import torch

    torch.set_num_threads(arguments.threads)
    return arguments


def require_gpu(device: str | None = None) -> None:
    """For benchmarks whose figures mean nothing without a GPU. One that can also run on a CPU gives
    its ``--device``: who asks for that one may see that it works.

    Raises:
        InvalidConfigError: there is no GPU.
    """
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        hint = "" if device is None else "; --device cpu --quick shows only that it works"
        raise InvalidConfigError(f"this benchmark measures a GPU, and torch sees none{hint}")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def open_engine(
    arguments: argparse.Namespace, *, traced: bool = True, **options: Any
) -> Iterator[LLM]:
    """An engine with the shared options, freed at the end.

    With ``--profile`` its first steady steps are traced, unless the script does that itself where
    it wants to (``traced=False``).
    """
    if arguments.nvtx:
        from mini_infer.modeling.profiling import enable_ranges

        enable_ranges("nvtx")
    shared = {name: getattr(arguments, name) for name in ("dtype", "load_format", "device")}
    options = shared | {"seed": arguments.seed} | options | dict(arguments.engine)
    with LLM(arguments.model, **options) as llm:
        if traced and arguments.profile is not None:
            with trace(arguments, llm, f"engine {next(_engine_numbers)}"):
                yield llm
        else:
            yield llm
    free_memory()


def free_memory() -> None:
    """Gives a GPU's memory back that nothing holds any more, for whoever comes next."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trace(
    arguments: argparse.Namespace, llm: LLM, name: str, skip: int | None = None
) -> "StepProfiler":
    """A context whose steps are traced into ``NAME.json.gz`` of the folder of ``--profile``.

    ``skip`` steps come first, by default those of ``--profile-skip``.
    """
    from step_profiler import StepProfiler

    path = arguments.profile / f"{name.replace(', ', '-').replace(' ', '-')}.json.gz"
    skip = arguments.profile_skip if skip is None else skip
    return StepProfiler(llm, path, skip, arguments.profile_steps)


@dataclass(frozen=True)
class Bar:
    """A figure that the project promises to reach."""

    name: str
    value: float | None
    """None where this run did not measure it."""
    at_least: float | None = None
    at_most: float | None = None
    """The one or the other."""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        if self.at_most is not None:
            return self.value <= self.at_most
        assert self.at_least is not None, "a bar has a bound"
        return self.value >= self.at_least

    @property
    def bound(self) -> str:
        """As text."""
        return (
            f"at least {self.at_least:g}" if self.at_most is None else f"at most {self.at_most:g}"
        )


@dataclass
class Report:
    """One run of one benchmark: how it was made, what it found."""

    benchmark: str
    summary: str
    setup: dict[str, Any]
    rows: list[dict[str, Value]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    """Every repeat's figures, only in the JSON: the spread behind the medians."""

    def print(self) -> None:
        print(f"{self.benchmark}: {self.summary}")
        for name, value in self.setup.items():
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) if _is_map(value) else value
            print(f"  {name:14} {shown}")
        print()
        print(format_table(self.rows))
        for bar in self.bars:
            verdict = {True: "met", False: "NOT met", None: "not measured"}[bar.met]
            print(f"{bar.name}: {format_value(bar.value)} (bar: {bar.bound}, {verdict})")
        for note in self.notes:
            print(note)

    def to_json(self) -> dict[str, Any]:
        result = asdict(self)
        result["bars"] = [asdict(bar) | {"met": bar.met} for bar in self.bars]
        return result

    def finish(self, output: Path | None) -> None:
        """Prints the report and writes the JSON beside it where asked."""
        self.print()
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")


def describe(
    arguments: argparse.Namespace, config: EngineConfig, *, cache: str, **lengths: Value
) -> dict[str, Any]:
    """Everything that a reader needs to make the same run, and to doubt this one.

    ``cache`` says in which state the prefix cache was; ``lengths`` are tokens in and out.
    """
    random_weights = config.load_format == "dummy"
    return {
        "model": arguments.model,
        "architecture": config.model_config.architecture,
        "weights": "random" if random_weights else f"real ({config.load_format})",
        "dtype": config.dtype,
        "lengths": lengths,
        "prefix cache": cache,
        "engine": {
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "block_size": config.block_size,
            "num_kv_blocks": config.num_kv_blocks,
            "depth": config.depth,
            "attention": config.attention_backend,
        },
        **describe_run(arguments, config.device),
        "machine": _machine(config.device) | {"torch_threads": arguments.threads},
    }


def describe_run(arguments: argparse.Namespace, device: str = "cpu") -> dict[str, Any]:
    """The part of the description that has nothing to do with a model."""
    return {
        "repeats": arguments.repeats,
        "seed": arguments.seed,
        "quick": arguments.quick,
        "machine": _machine(device),
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def format_value(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return str(value)


def format_table(rows: Sequence[dict[str, Value]]) -> str:
    """Aligned columns: text to the left, numbers to the right."""
    headings = list(dict.fromkeys(name for row in rows for name in row))
    cells = [headings, *([format_value(row.get(name)) for name in headings] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    left = [any(isinstance(row.get(name), str) for row in rows) for name in headings]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in cells
    )


def run(main: Callable[[], None]) -> None:
    """Runs a script's ``main``; a mini-infer error is one line and not a traceback, Ctrl-C none."""
    try:
        main()
    except MiniInferError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _is_map(value: object) -> bool:
    return isinstance(value, dict)


def _machine(device: str) -> dict[str, Value]:
    machine: dict[str, Value] = {
        "processor": _processor(),
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": platform.platform(),
        "load_average": round(psutil.getloadavg()[0], 2),
    }
    if device == "cuda":
        import torch

        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, Value]:
    versions: dict[str, Value] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    if commit.returncode == 0:
        versions["commit"] = commit.stdout.strip()
    return versions
