"""What the kernels of a trace add to a step, the largest first, and the anatomy of one layer.

    mini-infer bench trace_summary traces/batch-1.json.gz

Microseconds are what a kernel adds to the time of its step: from the end of all before it to its
own. So they sum to the whole, also where programmatic dependent launch lets kernels overlap.
"""

import argparse
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from harness import Value, format_table, positive
from kernel_trace import Kernel, Trace, find_layers, replays

NAME_WIDTH = 72


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path, nargs="+", help=".json or .json.gz of --profile")
    parser.add_argument("--top", type=positive, default=20, help="lines of each table")
    arguments = parser.parse_args(argv)
    for path in arguments.trace:
        try:
            trace = Trace.load(path)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            parser.error(f"{path} is no trace that can be read: {error}")
        print(f"== {path}")
        print("\n\n".join(summarise(trace, arguments.top)))


def summarise(trace: Trace, top: int) -> list[str]:
    """Paragraphs of text."""
    steps = trace.steps
    count = len(steps) or 1
    shown = f"{steps[0]} ... {steps[-1]}" if steps else "no named steps: as if it were one"
    kernels = trace.kernels()
    if not kernels:
        return [f"{count} steps on a CPU ({shown})", _operators(trace, count, top)]
    span = sum(kernel.added for kernel in kernels)
    idle = sum(kernel.idle for kernel in kernels)
    text = [
        f"{count} steps ({shown}): {span / count:.1f} us a step, {len(kernels) / count:.0f} "
        f"kernels, {100 * idle / span:.1f} % idle",
        format_table(_rows(kernels, count, span)[:top]),
    ]
    graphs = replays(kernels)
    if graphs:
        text += _anatomy(graphs, trace.num_layers, top)
    return text


def _rows(kernels: Sequence[Kernel], count: int, span: float) -> list[dict[str, Value]]:
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[_short(kernel.name), _grid(kernel)].append(kernel)
    rows: list[dict[str, Value]] = []
    for (name, grid), group in groups.items():
        added = sum(kernel.added for kernel in group)
        rows.append(
            {
                "kernel": name,
                "grid": grid,
                "a step": len(group) / count,
                "us a step": added / count,
                "%": 100 * added / span,
                "us each": added / len(group),
                "idle before": sum(kernel.idle for kernel in group) / len(group),
                "us alone": sum(kernel.end - kernel.start for kernel in group) / len(group),
            }
        )
    return sorted(rows, key=lambda row: -float(row["us a step"] or 0))


def _anatomy(graphs: Sequence[Sequence[Kernel]], num_layers: int, top: int) -> list[str]:
    """Of the replays with the most kernels: one layer, kernel by kernel, and what is around."""
    longest = max(map(len, graphs))
    same = [group for group in graphs if len(group) == longest]
    layers = find_layers([kernel.name for kernel in same[0]], num_layers)
    spans = [sum(kernel.added for kernel in group) - group[0].idle for group in same]
    whole = sum(spans) / len(same)
    text = [f"{len(same)} graph replays of {longest} kernels, {whole:.1f} us each"]
    if layers is None:
        return text
    end = layers.first + layers.period * layers.count
    rows: list[dict[str, Value]] = []
    for place in range(layers.period):
        members = [
            group[layers.first + index * layers.period + place]
            for group in same
            for index in range(layers.count)
        ]
        added = sum(kernel.added for kernel in members)
        rows.append(
            {
                "kernel of a layer": _short(members[0].name),
                "grid": _grid(members[0]),
                "us each": added / len(members),
                "us a step": added / len(same),
                "idle before": sum(kernel.idle for kernel in members) / len(members),
            }
        )
    text.append(format_table(rows))
    around = [kernel for group in same for kernel in (*group[: layers.first], *group[end:])]
    if around:
        text.append(f"around the {layers.count} layers, a step:")
        text.append(format_table(_rows(around, len(same), whole * len(same))[:top]))
    return text


def _operators(trace: Trace, count: int, top: int) -> str:
    rows: list[dict[str, Value]] = [
        {
            "operator": name,
            "a step": len(times) / count,
            "us a step": sum(times) / count,
            "us each": sum(times) / len(times),
        }
        for name, times in trace.operators().items()
    ]
    return format_table(sorted(rows, key=lambda row: -float(row["us a step"] or 0))[:top])


def _short(name: str) -> str:
    name = (
        name.removeprefix("void ")
        .replace("at::native::", "")
        .replace("(anonymous namespace)::", "")
    )
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."


def _grid(kernel: Kernel) -> str:
    grid = list(kernel.grid)
    while len(grid) > 1 and grid[-1] == 1:
        grid.pop()
    return "x".join(map(str, grid))


if __name__ == "__main__":
    main()
