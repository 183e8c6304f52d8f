"""Servers to measure, each in a process of its own, and what they say of themselves."""

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from harness import Value, describe_run, positive

from mini_infer.core.engine_config import DEFAULT_MODEL

COMMAND = "import sys; from mini_infer.cli.main import main; sys.exit(main())"
ROOT = Path(__file__).parents[1]
STOP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class RunningServer:
    """One that answers at ``url``."""

    url: str
    process: psutil.Process

    def resident_bytes(self) -> int:
        """Resident memory of the process and of all that it started; shared pages count once."""
        total = 0
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.uss)
            except psutil.NoSuchProcess:
                continue
        return total

    def cpu_seconds(self) -> float:
        """Processor time of the process and of all that it started, so far."""
        times = [
            process.cpu_times()
            for process in (self.process, *self.process.children(recursive=True))
        ]
        return sum(time.user + time.system for time in times)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics without its labels; of several with one name, their sum."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_idle(self, seconds: float) -> bool:
        """Waits until nothing runs or waits; False if that takes longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            metrics = self.metrics()
            if not metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]:
                return True
            time.sleep(0.05)
        return False


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """Starts a server whose first line ends with its address, and stops it at the end.

    Raises:
        SystemExit: it says no address, or fails to stop.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().split()
            if not line:
                raise SystemExit(f"{' '.join(command[:4])} ... does not start")
            yield RunningServer(line[-1], psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise SystemExit("the server did not stop when it was told to") from None


def mini_infer_server(*options: object) -> list[str]:
    """The command of ``mini-infer serve`` on a free port."""
    return [sys.executable, "-c", COMMAND, "serve", "--port", "0", *map(str, options)]


def make_server_parser(doc: str | None, *, repeats: int = 3) -> argparse.ArgumentParser:
    """The options of every benchmark that starts servers."""
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for mini-infer serve")
    parser.add_argument("--dry-run", action="store_true", help="invented tokens, no model")
    parser.add_argument("--repeats", type=positive, default=repeats, help="medians are over these")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    parser.add_argument("--quick", action="store_true", help="few requests: does it work at all?")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser


def model_options(arguments: argparse.Namespace) -> list[str]:
    """What ``mini-infer serve`` is told of the model."""
    return ["--dry-run"] if arguments.dry_run else ["--model", arguments.model]


def parse_quick(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **quick: Any
) -> argparse.Namespace:
    """Parses; with ``--quick``, ``quick`` and one repeat replace the defaults."""
    arguments = parser.parse_args(argv)
    if arguments.quick:
        parser.set_defaults(repeats=1, **quick)  # what the user typed still wins
        arguments = parser.parse_args(argv)
    return arguments


def describe_servers(arguments: argparse.Namespace, **lengths: Value) -> dict[str, Any]:
    """Everything that a reader needs to make the same run."""
    return {
        "model": "dry run" if arguments.dry_run else arguments.model,
        "weights": "no" if arguments.dry_run else "real",
        "dtype": "auto",
        "lengths": lengths,
        "prefix cache": "on",
        **describe_run(arguments),
    }
