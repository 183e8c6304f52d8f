"""The entry points: commands are imported when used, and every error becomes one line."""

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from mini_infer import __version__
from mini_infer.core.errors import DEBUG, MiniInferError

COMMANDS = {
    "serve": "mini_infer.cli.serve",
    "chat": "mini_infer.cli.chat",
    "generate": "mini_infer.cli.generate",
    "bench": "mini_infer.cli.bench",
    "pull": "mini_infer.cli.pull",
    "train-draft": "mini_infer.cli.train_draft",
    "doctor": "mini_infer.cli.doctor.command",
}
INTERRUPTED = 130


class LazyGroup(click.Group):
    """Imports a command's module when the command is named: ``pull`` never pays for ``serve``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mini-infer")
def cli() -> None:
    """An LLM inference engine to read in an afternoon and serve real models with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """``mini-infer``: returns the exit code."""
    return flush(run(cli, arguments, "mini-infer"))


def serve_main(arguments: Sequence[str] | None = None) -> int:
    """``mini-infer-serve``: the same as ``mini-infer serve``."""
    from mini_infer.cli.serve import serve

    return flush(run(serve, arguments, "mini-infer-serve"))


def run(command: click.Command, arguments: Sequence[str] | None, name: str) -> int:
    """Runs a command and turns whatever ends it into an exit code and at most one line.

    A user's mistake exits with 2, a fault with 1, Ctrl-C with 130. The environment variable
    ``MINI_INFER_DEBUG=1`` shows the traceback as well.
    """
    prepare_streams()
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return fail(usage_message(error, name), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away (`mini-infer generate ... | head`): nothing is left to say,
        # and Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MiniInferError as error:
        return fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        return fail(missing_package(error), 1)
    except OSError as error:  # a full disk behind standard output, too many open files
        return fail(f"the system refused: {error}", 1)
    except MemoryError:
        return fail("out of memory: use a smaller model, or lower kv_cache_memory", 1)
    except Exception as error:
        return fail(
            f"internal error, {type(error).__name__}: {error} "
            f"({DEBUG}=1 shows where; please report it)",
            1,
        )
    return result if isinstance(result, int) else 0


def flush(exit_code: int) -> int:
    """Writes out what the standard streams still hold, while a failure can still be told.

    Left to Python's own flush at exit, a full disk ends any command with 120 and a traceback.
    """
    for stream, to_stderr in ((sys.stdout, True), (sys.stderr, False)):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if to_stderr and not exit_code:
                exit_code = fail(f"the system refused: {error}", 1)
    return exit_code


def prepare_streams() -> None:
    """Makes the standard streams safe to use.

    One that the parent closed is None, and the next file or socket would get its number. What a
    terminal's encoding lacks is written as an escape instead of ending the answer.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def usage_message(error: click.ClickException, name: str) -> str:
    """Click's message, and where to read on."""
    if not isinstance(error, click.UsageError):
        return error.format_message()
    path = error.ctx.command_path if error.ctx else name
    return f"{error.format_message().rstrip('.')}; {path} --help shows what there is"


def missing_package(error: ModuleNotFoundError) -> str:
    """Names the package to install, where it is one that a user can lack."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "mini_infer"):
        return str(error)
    return (
        f"the Python package {package!r} is missing; "
        f'pip install "mini-infer[serve]" brings all that the commands need'
    )


def fail(message: str, exit_code: int) -> int:
    """Writes the one line (and the traceback, when debugging); returns the exit code."""
    if os.environ.get(DEBUG, "") not in ("", "0"):
        traceback.print_exc()
    with suppress(OSError):  # nobody can be told
        click.echo(f"error: {' '.join(message.split())}", err=True)
    return exit_code
