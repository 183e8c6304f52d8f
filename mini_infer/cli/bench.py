"""``mini-infer bench``: load on a server, or one of a checkout's benchmarks."""

import ast
import subprocess
import sys
from pathlib import Path

import click

import mini_infer
from mini_infer.core.errors import InvalidConfigError

FOLDER = Path(mini_infer.__file__).parents[1] / "benchmarks"
SERVE = "serve"


def benchmarks(folder: Path) -> dict[str, str]:
    """Name to first line of the docstring, of every script that can be run."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "__main__" in source:
            docstring = ast.get_docstring(ast.parse(source)) or ""
            found[path.stem] = docstring.partition("\n")[0]
    return found


class Benchmarks(click.Group):
    """``serve``, which is part of the package, and a command per script of a checkout."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [SERVE, *benchmarks(FOLDER)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == SERVE:
            from mini_infer.cli.load.command import serve

            return serve
        found = benchmarks(FOLDER)
        if cmd_name in found:
            return script(cmd_name, found[cmd_name])
        if not found:
            raise InvalidConfigError(
                f"no benchmarks in {FOLDER}: they are part of a checkout; "
                f"clone the repository and install it with pip install -e"
            )
        raise InvalidConfigError(
            f"no benchmark {cmd_name!r}; there are: {', '.join((SERVE, *found))}"
        )


def script(name: str, summary: str) -> click.Command:
    """A command that runs a script in a process of its own, with its own options."""

    @click.command(
        name,
        help=summary,
        add_help_option=False,  # the script has one
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> int:
        return subprocess.call([sys.executable, str(FOLDER / f"{name}.py"), *arguments])

    return run


@click.group(cls=Benchmarks, invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Put load on a server (serve), run one of a checkout's benchmarks, or list them.

    `mini-infer bench NAME --help` shows a benchmark's options. With `--profile FOLDER` one that has
    an engine writes traces for Perfetto, which `mini-infer bench trace_summary` sums up.
    """
    if context.invoked_subcommand is not None:
        return
    found = {SERVE: "Load on any server of OpenAI's API.", **benchmarks(FOLDER)}
    width = max(map(len, found))
    for known, summary in found.items():
        click.echo(f"{known:{width}}  {summary}")
