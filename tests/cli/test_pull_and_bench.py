"""``mini-infer pull`` and ``mini-infer bench``: thin, but their contracts are used by scripts."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from mini_infer.cli import bench as bench_module
from mini_infer.cli.bench import benchmarks
from mini_infer.cli.main import main

SCRIPT = '''"""Counts to three.

More about it.
"""
import sys
if __name__ == "__main__":
    print(*sys.argv[1:], flush=True)
    sys.exit(len(sys.argv) - 1)
'''


def test_pull_prints_the_folder_as_its_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake = ModuleType("mini_infer.modeling.pull")
    fake.pull = lambda model: tmp_path / model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mini_infer.modeling.pull", fake)
    assert main(["pull", "some-model"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "some-model")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "count.py").write_text(SCRIPT)
    (tmp_path / "harness.py").write_text('"""Shared parts."""\n')
    monkeypatch.setattr(bench_module, "FOLDER", tmp_path)
    return tmp_path


def test_bench_lists_what_can_be_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks(folder) == {"count": "Counts to three."}
    assert main(["bench"]) == 0
    serve, count = capsys.readouterr().out.splitlines()
    assert (serve.split()[0], count) == ("serve", "count  Counts to three.")


@pytest.mark.parametrize(
    "arguments", [[], ["--fast"], ["--output", "x.json", "--help"], ["--profile", "traces"]]
)
def test_bench_passes_arguments_and_exit_code(
    folder: Path, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "count", "--", *arguments]) == len(arguments)
    assert capfd.readouterr().out == " ".join(arguments) + "\n"


def test_bench_passes_options_without_a_separator(folder: Path) -> None:
    assert main(["bench", "count", "--profile", "traces", "--runs", "9"]) == 4


def test_bench_names_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "harness"]) == 2
    assert "there are: serve, count" in capsys.readouterr().err


def test_bench_without_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_module, "FOLDER", tmp_path / "benchmarks")
    assert main(["bench"]) == 0, "serve is part of the package"
    assert capsys.readouterr().out.split()[0] == "serve"
    assert main(["bench", "count"]) == 2
    assert "clone the repository" in capsys.readouterr().err
