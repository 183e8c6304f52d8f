"""Start-up on a GPU: seconds of each phase from the command to the first token.

Every start is a process of its own. A cold one finds an empty folder for compiled kernels, as a new
machine does; a warm one finds what the cold one left.

    python benchmarks/startup_gpu.py --model benchmarks/models/qwen2.5-7b --load-format dummy
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 15.0
START = "--start"
"""The option with which this script calls itself."""
PHASES = {
    "load": "weights",
    "profile_num_blocks": "memory profile",
    "init_cache": "KV cache",
    "capture_graphs": "CUDA graphs",
}
"""Method of ModelRunner -> what it is for. Kernels are compiled by no method of it."""


def start(model: str, options: dict[str, Any], spawned: float) -> dict[str, Any]:
    """One start in this process: seconds by phase, and what it took.

    Nothing heavy is imported at the top of this file, for an import is a phase.
    """
    seconds: dict[str, float] = {"interpreter": time.time() - spawned}
    last = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[phase] = seconds.get(phase, 0.0) + now - last
        last = now

    import torch

    lap("import torch")
    torch.zeros(1, device="cuda")
    lap("GPU context")
    from mini_infer import LLM, SamplingParams
    from mini_infer.modeling.model_runner import ModelRunner
    from mini_infer.runtime import local_executor

    lap("import mini_infer")
    depth = 0

    def watch(owner: Any, name: str, phase: str) -> None:
        call = getattr(owner, name)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            nonlocal depth
            if depth:  # part of the phase that called it
                return call(*arguments, **keywords)
            lap("rest")
            depth += 1
            result = call(*arguments, **keywords)
            depth -= 1
            torch.cuda.synchronize()
            lap(phase)
            return result

        setattr(owner, name, watched)

    watch(local_executor, "compile_kernels", "kernels")
    for name, phase in PHASES.items():
        watch(ModelRunner, name, phase)
    llm = LLM(model, **options)
    lap("rest")
    ready = time.time() - spawned
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    lap("first two tokens")
    return {
        "seconds": seconds,
        "ready": ready,
        "peak_host_gib": _peak_host_bytes() / 2**30,
        "peak_gpu_gib": torch.cuda.max_memory_reserved() / 2**30,
        "compilers_imported": [name for name in ("sympy", "transformers") if name in sys.modules],
    }


def _peak_host_bytes() -> int:
    """The high-water mark of resident memory: all that was touched, mapped files included."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def start_process(model: str, options: dict[str, Any], compiled: str) -> dict[str, Any]:
    """One start in a process of its own, whose compiled kernels are kept in ``compiled``."""
    command = [sys.executable, __file__, START, json.dumps([model, options, time.time()])]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {"TRITON_CACHE_DIR": compiled},
    )
    if done.returncode:
        raise SystemExit("the engine did not start: its messages are above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["kernels"] = sum(1 for _ in Path(compiled).glob("*/*.cubin"))
    return result


def main(argv: Sequence[str] | None = None) -> None:
    from harness import Bar, Report, describe, make_parser, median, parse, require_gpu

    parser = make_parser(__doc__, repeats=2)
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="of a cold start")
    arguments = parse(parser, argv)
    require_gpu()
    shared = {name: getattr(arguments, name) for name in ("dtype", "load_format")}
    options = shared | {"seed": arguments.seed} | dict(arguments.engine)
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as compiled:
            for state, results in starts.items():
                print(f"{state} start", file=sys.stderr)
                results.append(start_process(arguments.model, options, compiled))

    from mini_infer.runtime.resolve import resolve_engine

    config, _, _ = resolve_engine({"model": arguments.model} | options)
    report = Report(
        "startup_gpu",
        "seconds of each phase of a start-up",
        describe(arguments, config, cache="empty", prompt=3, output=2),
    )
    for phase in dict.fromkeys(name for run in starts["cold"] for name in run["seconds"]):
        row = {state: median([run["seconds"][phase] for run in starts[state]]) for state in starts}
        report.rows.append({"phase": phase} | row)
    for name, key in (
        ("ready for requests (s)", "ready"),
        ("peak host memory (GiB)", "peak_host_gib"),
        ("peak GPU memory (GiB)", "peak_gpu_gib"),
        ("kernels compiled so far", "kernels"),
    ):
        figures = {state: median([run[key] for run in starts[state]]) for state in starts}
        report.rows.append({"phase": name} | figures)
    ready = median([run["ready"] for run in starts["cold"]])
    report.bars.append(
        Bar("cold start, seconds until requests are served", ready, at_most=arguments.limit)
    )
    report.samples = dict(starts)
    report.finish(arguments.output)


if __name__ == "__main__":
    if sys.argv[1:2] == [START]:
        print(json.dumps(start(*json.loads(sys.argv[2]))))
    else:
        from harness import run

        run(main)
