"""Renders results/*.json as markdown: the tables of docs/results.md.

python benchmarks/report.py                      # to standard output
python benchmarks/report.py --into docs/results.md
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- results: benchmarks/report.py -->", "<!-- end of results -->"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--into", type=Path, help="document whose marked part is replaced")
    arguments = parser.parse_args(argv)
    paths = sorted(arguments.results.glob("*.json"))
    if not paths:
        sys.exit(f"no results in {arguments.results}: run mini-infer bench suite first")
    text = render_all({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths})
    if arguments.into is None:
        print(text)
        return
    document = arguments.into.read_text(encoding="utf-8")
    if BEGIN not in document or END not in document:
        sys.exit(f"{arguments.into} has no lines {BEGIN} and {END}")
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    arguments.into.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


def render_all(results: dict[str, dict[str, Any]]) -> str:
    """All results by their names, those of a CPU first."""
    parts = []
    for heading, wanted in (("On a CPU", False), ("On a GPU", True)):
        chosen = {name: result for name, result in results.items() if _on_gpu(result) is wanted}
        if chosen:
            parts += [f"## {heading}", *(render(name, chosen[name]) for name in chosen)]
    return "\n\n".join(parts)


def _on_gpu(result: dict[str, Any]) -> bool:
    return "gpu" in result or "gpu" in result.get("setup", {}).get("machine", {})


def render(name: str, result: dict[str, Any]) -> str:
    """One result as a heading, how it was made, a table, and its bars."""
    if "rows" not in result:  # a script with a schema of its own: its plain values are the row
        rows = [{key: value for key, value in result.items() if _is_plain(value)}]
        rows[0].pop("benchmark", None)
        tables = [rows, *result.get("tables", {}).values()]
        return "\n\n".join([f"### {name}", *map(markdown_table, tables)])
    lines = [f"### {name}", "", _setup(result["setup"]), ""]
    lines.append(markdown_table(result["rows"]))
    if result["bars"]:
        lines.append("")
    for bar in result["bars"]:
        verdict = {True: "met", False: "not met", None: "not measured"}[bar["met"]]
        value = _cell(bar["value"])
        lines.append(f"- {bar['name']}: {value} (bar: {_bound(bar)}, {verdict})")
    lines += [f"- {note}" for note in result["notes"]]
    return "\n".join(lines)


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    headings = list(dict.fromkeys(name for row in rows for name in row))
    lines = [headings, ["---"] * len(headings)]
    lines += [[_cell(row.get(name)) for name in headings] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _setup(setup: dict[str, Any]) -> str:
    """The header as one paragraph; the JSON has all of it."""
    machine, versions = setup.get("machine", {}), setup.get("versions", {})
    parts = [f"{setup.get('model')}, {setup.get('weights')} weights, {setup.get('dtype')}"]
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in setup["lengths"].items()]
    parts.append(f"prefix cache {setup.get('prefix cache')}")
    hardware = machine.get("gpu") or machine.get("processor")
    parts.append(f"{hardware}, {machine.get('cores')} cores")
    if "card" in setup:
        limits = ", ".join(f"{name} {value}" for name, value in setup["card"].items())
        parts.append(f"the card's limits in the same run: {limits}")
    parts += [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    parts.append(f"medians of {setup.get('repeats')}")
    if setup.get("quick"):
        parts.append("QUICK RUN, not a result")
    return "; ".join(parts) + "."


def _bound(bar: dict[str, Any]) -> str:
    if bar.get("at_most") is not None:
        return f"at most {bar['at_most']:g}"
    return f"at least {bar['at_least']:g}"


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    main()
