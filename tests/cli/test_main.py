"""Whatever ends a command becomes an exit code and one line: in this process, by fakes."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from mini_infer import __version__
from mini_infer.cli.main import COMMANDS, cli, main, run, serve_main
from mini_infer.core.errors import EngineDeadError, InvalidConfigError, WeightsError

ROOT = Path(__file__).parents[2]


def command_that(action: Callable[[], object]) -> click.Command:
    return click.Command("fake", callback=action)


def raising(error: BaseException) -> click.Command:
    def action() -> None:
        raise error

    return command_that(action)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InvalidConfigError("block_size must be 1"), 2, "error: block_size must be 1"),
        (WeightsError("no tensor\n  named x"), 2, "error: no tensor named x"),
        (EngineDeadError("the engine stopped"), 1, "error: the engine stopped"),
        (click.ClickException("no"), 1, "error: no"),
        (click.UsageError("No such option."), 2, "error: No such option; fake --help shows"),
        (ValueError("boom"), 1, "error: internal error, ValueError: boom"),
        (ModuleNotFoundError("no", name="fastapi.responses"), 1, "package 'fastapi' is missing"),
        (ModuleNotFoundError("gone", name="mini_infer.x"), 1, "error: gone"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_is_one_line_and_an_exit_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(raising(error), [], "fake") == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert line in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interrupt_exits_with_130(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(error), [], "fake") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINI_INFER_DEBUG", "1")
    assert run(raising(ValueError("boom")), [], "fake") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (3, 3)])
def test_result_of_a_command_is_its_exit_code(result: object, code: int) -> None:
    assert run(command_that(lambda: result), [], "fake") == code


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("serve", "chat", "generate", "bench", "pull"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"Usage: mini-infer {name}" in capsys.readouterr().out


def test_serve_main_is_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_main(["--help"]) == 0
    assert "Usage: mini-infer-serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "no-such-command",
        "serve --no-such-option",
        "serve --port 99999",
        "serve --port http",
        "serve --dtype int3",
        "serve --block-size many",
        "generate --dry-run --prompt x --kv-cache-memory much",
        "generate --dry-run --prompt x --block-size 0",
        "generate --dry-run --prompt x --temperature -1",
        "generate --dry-run --prompt x --temperature nan",
        "generate --dry-run --prompt x --top-p 1.5",
        "generate --dry-run --prompt x --max-tokens 0",
        "generate --dry-run --prompt x --max-tokens 9000",
        "generate --dry-run --prompt x --max-model-len 1000000",
        "generate --dry-run --prompt x --no-chunked-prefill --max-num-batched-tokens 64",
        "generate --dry-run --prompt 'a longer prompt than a block' --num-kv-blocks 1",
        "generate --dry-run --prompt x --scheduling-policy no_module:Policy",
        "generate --dry-run --prompt x --max-model-len 1",
        "generate --model /no/such/folder --prompt x",
        "pull no-such-alias",
        "pull",
        "bench no-such-benchmark",
    ],
)
def test_bad_input_exits_with_2_and_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_closed_pipe_is_quiet() -> None:
    program = "import sys; from mini_infer.cli.main import main; sys.exit(main())"
    arguments = ["generate", "--dry-run", "--ignore-eos", "--max-tokens", "4000", "--prompt", "x"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("generate --dry-run --max-tokens 3 <&-", 2),
        ("generate --dry-run --max-tokens 3 --prompt x >&-", 0),
        ("generate --dry-run --max-tokens 3 --prompt x --prompt y 2>&-", 0),
        ("generate --dry-run --max-tokens 3 --prompt x > /dev/full", 1),
        ("generate --dry-run --max-tokens 0 --prompt x 2> /dev/full", 2),
        ("chat --dry-run <&-", 0),
    ],
)
def test_closed_or_full_standard_streams(line: str, code: int) -> None:
    program = "import sys; from mini_infer.cli.main import main; sys.exit(main())"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {line}"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == code
    assert "internal error" not in done.stderr
    assert done.stderr.count("\n") <= 1


def test_a_terminal_that_lacks_a_character_gets_an_escape() -> None:
    program = "import sys; from mini_infer.cli.main import main; sys.exit(main())"
    arguments = ["generate", "--dry-run", "--json", "--max-tokens", "3", "--prompt", "\u65e5"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["prompt"] == "\u65e5"


def test_commands_are_imported_when_named() -> None:
    program = (
        "import sys; from mini_infer.cli.main import main; main(['pull', '--help']); "
        "print([m for m in sys.modules if m.startswith('mini_infer.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = done.stdout.splitlines()[-1]
    assert "mini_infer.cli.pull" in loaded
    for other in ("cli.serve", "cli.chat", "runtime", "serving", "modeling"):
        assert f"mini_infer.{other}" not in loaded


def test_group_knows_no_other_command() -> None:
    assert cli.get_command(click.Context(cli), "main") is None
