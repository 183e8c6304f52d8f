"""``mini-infer bench``: run one of a checkout's benchmarks."""

import ast
import subprocess
import sys
from pathlib import Path

import click

import mini_infer
from mini_infer.core.errors import InvalidConfigError

FOLDER = Path(mini_infer.__file__).parents[1] / "benchmarks"


def benchmarks(folder: Path) -> dict[str, str]:
    """Name to first line of the docstring, of every script that can be run."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "__main__" in source:
            docstring = ast.get_docstring(ast.parse(source)) or ""
            found[path.stem] = docstring.partition("\n")[0]
    return found


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
)
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, arguments: tuple[str, ...]) -> int:
    """Run the benchmark NAME with its own ARGUMENTS, or list the benchmarks.

    `mini-infer bench NAME -- --help` shows a benchmark's options. With `--profile FOLDER` one that
    has an engine writes traces for Perfetto, which `mini-infer bench trace_summary` sums up.
    """
    found = benchmarks(FOLDER)
    if not found:
        raise InvalidConfigError(
            f"no benchmarks in {FOLDER}: they are part of a checkout; "
            f"clone the repository and install it with pip install -e"
        )
    if name is None:
        width = max(map(len, found))
        for known, summary in found.items():
            click.echo(f"{known:{width}}  {summary}")
        return 0
    if name not in found:
        raise InvalidConfigError(f"no benchmark {name!r}; there are: {', '.join(found)}")
    return subprocess.call([sys.executable, str(FOLDER / f"{name}.py"), *arguments])
