"""A server as a user starts it, whose engine, client, disk or request is at fault."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import pytest

from tests.serving.live import CHAT, COMPLETIONS, PATIENCE, wait_for

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from mini_infer.cli.main import serve_main; sys.exit(serve_main())"
SLOW = ("--scheduling-policy", "tests.runtime.hooks:Slow")
POISON = ("--scheduling-policy", "tests.runtime.hooks:Poison")
HELLO = [{"role": "user", "content": "Hello"}]
ENDLESS: dict[str, Any] = {"messages": HELLO, "max_tokens": 4000, "ignore_eos": True}


@dataclass
class Server:
    process: "subprocess.Popen[str]"
    url: str
    client: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        [engine] = psutil.Process(self.process.pid).children()
        return engine.pid

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post(CHAT, json={"messages": HELLO, "max_tokens": 3, **fields})

    @contextlib.contextmanager
    def stream(self, **fields: Any) -> Iterator[Iterator[str]]:
        """The lines of a stream that has begun."""
        body = {**ENDLESS, "stream": True, **fields}
        with self.client.stream("POST", CHAT, json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "assistant" in next(lines)
            yield lines

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def server(
    *options: str, stderr: int | IO[Any] | None = None, program: str = PROGRAM
) -> Iterator[Server]:
    command = [sys.executable, "-c", program, "--dry-run", "--port", "0", *options]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                yield Server(process, url, client)
        finally:
            process.kill()


def is_well(running: Server) -> bool:
    return running.client.get("/health").status_code == 200


def test_a_killed_engine_is_an_error_in_the_stream_and_serves_again() -> None:
    with server(*SLOW, stderr=subprocess.PIPE) as running:
        with running.stream() as lines:
            os.kill(running.engine_pid, signal.SIGKILL)
            *_, error, done = lines
        assert done == "data: [DONE]"
        fault = json.loads(error.removeprefix("data: "))["error"]
        assert fault["type"] == "service_unavailable_error"
        assert "was killed by SIGKILL and is being restarted" in fault["message"]
        health, refused = running.client.get("/health"), running.chat()
        assert health.status_code == refused.status_code == 503
        assert refused.headers["retry-after"] == "2"
        assert "is being restarted" in health.json()["error"]["message"]
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        wait_for(lambda: is_well(running))
        assert running.chat().status_code == 200
        metrics = running.client.get("/metrics").text
        assert 'request_success_total{engine="0",finished_reason="error"' in metrics
        assert 'num_requests_running{engine="0",model_name="dry-run"} 0.0' in metrics
        assert running.end() == 0
        assert running.process.stderr is not None
        log = running.process.stderr.read()
    assert log.splitlines()[0] == (
        "the engine was killed by SIGKILL; its requests ended with an error"
    )
    assert "Traceback" not in log


def test_a_server_whose_engine_cannot_be_restarted_says_so_and_ends() -> None:
    program = f"import mini_infer.runtime.engine_restarts as r; r.FIRST_DELAY = 0.001\n{PROGRAM}"
    with server(*SLOW, stderr=subprocess.PIPE, program=program) as running:
        with running.stream() as lines:
            killing = threading.Thread(target=kill_engines, args=(running.process.pid,))
            killing.start()
            *_, _, done = lines
        assert done == "data: [DONE]"
        assert running.process.wait(PATIENCE) == 1
        killing.join()
        assert running.process.stderr is not None
        log = running.process.stderr.read()
    last = log.splitlines()[-1]
    assert last.startswith("error: the engine ")
    assert last.endswith("5 restarts did not help")
    assert "Traceback" not in log


def kill_engines(server_pid: int) -> None:
    """Kills every engine of a server until there is no server."""
    server = psutil.Process(server_pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        while server.status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in server.children():
                    child.kill()
            threading.Event().wait(0.002)


def test_a_poison_request_fails_alone() -> None:
    with server(*POISON, stderr=subprocess.DEVNULL) as running:
        expected = running.chat(max_tokens=30, temperature=0).json()["choices"]
        poison = {"prompt": "poison", "max_tokens": 30}
        with ThreadPoolExecutor(9) as pool:
            asked = [
                pool.submit(running.chat, max_tokens=30, temperature=0, stream=False)
                for _ in range(8)
            ]
            bad = pool.submit(running.client.post, COMPLETIONS, json=poison)
            assert bad.result().status_code == 500
            assert "the model failed on this request" in bad.result().json()["error"]["message"]
            assert "secret" not in bad.result().text
            assert [one.result().json()["choices"] for one in asked] == [expected] * 8
        assert is_well(running)
        assert running.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_lets_what_runs_finish(number: signal.Signals) -> None:
    with server(*SLOW, stderr=subprocess.PIPE) as running:
        begun, count = threading.Semaphore(0), 24

        def read() -> list[str]:
            with running.stream(max_tokens=40) as lines:
                begun.release()
                return list(lines)

        with ThreadPoolExecutor(count) as pool:
            answers = [pool.submit(read) for _ in range(count)]
            for _ in range(count):
                begun.acquire()
            assert running.end(number) == 0
            for answer in answers:
                *_, finish, done = answer.result()
                assert '"finish_reason":"length"' in finish
                assert done == "data: [DONE]"
        assert running.process.stderr is not None
        assert running.process.stderr.read() == ""


def test_a_killed_server_leaves_no_engine() -> None:
    with server(*SLOW) as running, running.stream():
        engine = psutil.Process(running.engine_pid)
        running.process.kill()
        wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_for_logs_stops_nobody() -> None:
    options = ("--access-log", "--log-interval", "0.01", *POISON)
    with open("/dev/full", "w") as full, server(*options, stderr=full) as running:
        for _ in range(3):
            assert running.chat().status_code == 200
        refused = running.client.post(COMPLETIONS, json={"prompt": "poison"})
        assert refused.status_code == 500
        os.kill(running.engine_pid, signal.SIGKILL)
        wait_for(lambda: not is_well(running))
        wait_for(lambda: is_well(running))
        with running.stream(max_tokens=200) as lines:
            assert list(lines)[-1] == "data: [DONE]"
        assert running.end() == 0


def test_half_open_connections_keep_nobody_out() -> None:
    """As many as the system allows, ten thousand at most; the server may open 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 400), hard))
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n" + PROGRAM
    )
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    try:
        with server(program=program) as running, contextlib.ExitStack() as stack:
            for index in range(count):
                connection = stack.enter_context(socket.create_connection(running.address))
                with contextlib.suppress(OSError):  # it was cut, as others came
                    connection.sendall((b"", head)[index % 2])
                if index % (count // 4) == count // 8:
                    assert running.chat().status_code == 200
            assert running.chat().status_code == 200
            assert psutil.Process(running.process.pid).num_fds() < 700
            assert running.end() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
