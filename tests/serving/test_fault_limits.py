"""Faults of a server's parts, each within ten seconds: a clear error, and nothing left behind.

Ranks that are killed, stopped, or loop are in ``tests/runtime/test_mp_executor.py``.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.serving.live import CHAT, PATIENCE, wait_for
from tests.serving.test_faults import PROGRAM, ROOT, SLOW, Server, server
from tests.serving.test_replicas import OK, TWO, engines_of, is_alive

pytestmark = pytest.mark.processes

LIMIT = 10.0
"""Seconds from a fault to its error."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where all sockets are that this test's processes make; none may be left at its end, nor
    anything in shared memory."""
    shared = shared_memory()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="mini-infer-test-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        wait_for(lambda: not list(Path(folder).iterdir()))
    assert shared_memory() <= shared


def shared_memory() -> set[str]:
    """Names of what this user's processes have there."""
    mounted = Path("/dev/shm")
    names = ("torch_", "gloo", "nccl-", "mini-infer")
    if not mounted.exists():
        return set()
    return {path.name for path in mounted.iterdir() if path.name.startswith(names)}


def within_limit(condition: Callable[[], bool], begin: float) -> None:
    wait_for(condition)
    assert time.monotonic() - begin < LIMIT


def assert_error_in_stream(lines: Iterator[str], why: str) -> None:
    *_, error, done = lines
    assert done == "data: [DONE]"
    fault = json.loads(error.removeprefix("data: "))["error"]
    assert fault["type"] == "service_unavailable_error"
    assert why in fault["message"]


def test_a_killed_replica(folder: Path) -> None:
    with server(*TWO) as running:
        engines = engines_of(running)
        assert len(list(folder.iterdir())) == 2
        with running.stream() as lines:
            begin = time.monotonic()
            for engine in engines:
                os.kill(engine.pid, signal.SIGKILL)
            assert_error_in_stream(lines, "was killed by SIGKILL and is being restarted")
            assert time.monotonic() - begin < LIMIT
        within_limit(lambda: not any(map(is_alive, engines)), begin)
        wait_for(lambda: running.client.get("/health").json() == OK)
        assert len(list(folder.iterdir())) == 2, "those of the dead are gone"
        assert running.end() == 0


def test_a_killed_server_and_with_it_the_router_and_its_clients(folder: Path) -> None:
    with server(*TWO) as running, running.stream() as lines:
        engines = engines_of(running)
        begin = time.monotonic()
        running.process.kill()
        with pytest.raises(Exception, match=r"closed|incomplete|reset"):  # the client's own
            list(lines)
        within_limit(lambda: not any(map(is_alive, engines)), begin)
        within_limit(lambda: not list(folder.iterdir()), begin)


def refused(*options: str) -> tuple[str, float]:
    """What a server says that can't start, and how long that took. No process of it is left."""
    begin = time.monotonic()
    process = psutil.Popen(
        [sys.executable, "-c", PROGRAM, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started: dict[int, psutil.Process] = {}
    while process.poll() is None:
        for child in process.children(recursive=True):
            started[child.pid] = child
        assert time.monotonic() - begin < PATIENCE
        time.sleep(0.01)
    took = time.monotonic() - begin
    _, alive = psutil.wait_procs(list(started.values()), timeout=LIMIT)
    assert not alive
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout, stderr.count("\n")) == (2, "", 1), stderr
    return stderr, took


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_port_that_is_taken(replicas: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error, took = refused("--dry-run", "--replicas", replicas, "--port", port)
    assert f"port {port}: Address already in use; choose another with --port" in error
    assert took < LIMIT


@pytest.fixture(scope="module")
def torch_seconds() -> float:
    """What it takes just now until torch is there, which has to be asked for GPUs."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - begin


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "options", [("--replicas", "2"), ("--tensor-parallel-size", "2")], ids=" ".join
)
def test_a_gpu_that_is_not_there(
    options: tuple[str, ...],
    tiny_folder: Path,
    torch_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = ("--model", str(tiny_folder), "--device", "cuda", "--port", "0", *options)
    error, took = refused(*asked)
    assert "device 'cuda' was asked for, but torch sees no GPU" in error
    assert took < LIMIT + 2 * torch_seconds


def test_a_killed_engine_that_nobody_asks(folder: Path) -> None:
    """Its death is noticed without a request."""
    with server(*SLOW) as running:
        begin = time.monotonic()
        os.kill(running.engine_pid, signal.SIGKILL)
        within_limit(lambda: running.client.get("/health").status_code == 503, begin)
        assert_unavailable(running)
        wait_for(lambda: running.client.get("/health").status_code == 200)
        assert len(list(folder.iterdir())) == 1
        assert running.end() == 0


def assert_unavailable(running: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    answer = running.client.post(CHAT, json=body)
    assert answer.status_code == 503
    assert "was killed by SIGKILL" in answer.json()["error"]["message"]
