"""What is here, and what of it works: all that can be told without torch."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mini_infer.cli.doctor.report import Finding, gib

REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "llguidance", "gguf", "psutil")
OPTIONAL = {
    "triton": "kernels on a GPU",
    "flash_attn": "--attention-backend flash_attn",
    "huggingface_hub": "models by their hub id",
    "fastapi": "the server",
    "uvicorn": "the server",
    "msgspec": "engines and ranks in processes of their own",
    "zmq": "engines and ranks in processes of their own",
    "prometheus_client": "the server's metrics",
    "ray": "ranks on several hosts, Ray Serve",
    "opentelemetry.sdk": "traces",
}
"""Modules, and what needs them."""
DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "flash_attn": "flash-attn",
    "opentelemetry.sdk": "opentelemetry-sdk",  # its interfaces alone come with FastAPI
}
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 64 * 2**20
"""What Docker gives a container by default; NCCL fills it with a few GPUs."""
LEAST_OPEN_FILES = 1024
TOPOLOGY_SECONDS = 10.0


def software() -> Iterator[Finding]:
    """Python and packages, none of them imported."""
    yield Finding("Software", "Python", f"{platform.python_version()} on {platform.platform()}")
    for module in REQUIRED:
        if (version := version_of(module)) is not None:
            yield Finding("Software", module, version)
        else:
            hint = f"pip install {module}"
            yield Finding("Software", module, "missing", "fail", hint)
    for module, purpose in OPTIONAL.items():
        missing = f"not installed; needed for: {purpose}"
        yield Finding("Software", module, version_of(module) or missing)
    if DRIVER.is_file():
        first_line = DRIVER.read_text().partition("\n")[0]
        yield Finding("Software", "GPU driver", first_line.removeprefix("NVRM version: "))


def version_of(module: str) -> str | None:
    """A package's version; None where it is not installed."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.metadata.version(DISTRIBUTIONS.get(module, module))
    except importlib.metadata.PackageNotFoundError:
        return "installed"
    except (ImportError, ValueError):  # something that only calls itself so
        return None


def hardware() -> Iterator[Finding]:
    """Processors and memory."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    yield Finding("Machine", "CPU cores", f"{usable} of {cores} usable")
    try:
        import psutil
    except ImportError:
        return
    memory = psutil.virtual_memory()
    yield Finding("Machine", "memory", f"{gib(memory.available)} of {gib(memory.total)} free")


def system() -> Iterator[Finding]:
    """The cache folder, shared memory and the limit of open files."""
    yield _cache_folder()
    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        value = f"{gib(usage.free)} of {gib(usage.total)} free"
        if usage.free < LEAST_SHARED_MEMORY:
            hint = "give the container more (--shm-size): ranks and NCCL keep buffers there"
            yield Finding("Machine", "shared memory", value, "warn", hint)
        else:
            yield Finding("Machine", "shared memory", value, "ok")
    if (files := _open_files()) is not None:
        if 0 <= files < LEAST_OPEN_FILES:
            hint = f"ulimit -n {LEAST_OPEN_FILES * 4}: each connection of a server takes one"
            yield Finding("Machine", "open files", str(files), "warn", hint)
        else:
            yield Finding("Machine", "open files", "no limit" if files < 0 else str(files), "ok")


def _cache_folder() -> Finding:
    from mini_infer.modeling.model_cache import cache_folder

    folder = cache_folder()
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:  # where it would be made, if it is not there: a doctor leaves nothing behind
        with tempfile.TemporaryFile(dir=there):
            pass
        free = shutil.disk_usage(there).free
    except OSError as error:
        hint = "name another folder in the environment variable MINI_INFER_CACHE"
        value = f"can't write to {there}: {error.strerror or error}"
        return Finding("Machine", "cache folder", value, "fail", hint)
    return Finding("Machine", "cache folder", f"{folder}, {gib(free)} free", "ok")


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def links() -> dict[tuple[int, int], str] | None:
    """How each two GPUs are connected, as ``nvidia-smi topo -m`` says it (NV18: 18 NVLinks); None
    where it can't be asked, or counts GPUs that torch is not shown."""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=TOPOLOGY_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_links(done.stdout) if done.returncode == 0 else None


def parse_links(table: str) -> dict[tuple[int, int], str]:
    """Pairs of GPUs in ``nvidia-smi topo -m``'s matrix."""
    rows = [
        line.replace("\x1b[4m", "").replace("\x1b[0m", "").split() for line in table.split("\n")
    ]
    matrix = [row for row in rows if row and row[0].startswith("GPU") and "X" in row]
    found = {}
    for first, row in enumerate(matrix):
        for second, link in enumerate(row[1 : 1 + len(matrix)]):
            if first < second:
                found[first, second] = link
    return found
