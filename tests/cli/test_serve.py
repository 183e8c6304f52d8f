"""``mini-infer serve``: checks before it loads, answers without torch, ends when told."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_infer.cli.main import main
from mini_infer.cli.serve import collector_paused
from mini_infer.core.errors import InvalidConfigError
from mini_infer.serving.options import ServerOptions

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
# Prints the heavy modules that were imported when the server ends.
PROGRAM = """
import sys
from mini_infer.cli.main import serve_main
code = serve_main()
print([m for m in ("torch", "transformers", "numpy") if m in sys.modules])
sys.exit(code)
"""
# Each would have the system kill the process, or end in MemoryError.
ABSURD = (
    "--num-kv-blocks 99999999999999",
    "--kv-cache-memory 99999999999TiB",
    "--max-num-seqs 1000000000000",
    f"--max-num-seqs 1{'0' * 400}",
)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_port_in_use_is_found_before_the_model(
    taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "/no/such/model", "--port", str(taken_port)]) == 2
    error = capsys.readouterr().err
    assert f"port {taken_port}" in error
    assert "--port" in error
    assert "/no/such/model" not in error


@pytest.mark.parametrize("host", ["256.0.0.1", "x" * 300, "a\udcff", ""])
def test_unknown_host(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--host", host]) == 2
    error = capsys.readouterr().err
    assert "--host" in error
    assert error.count("\n") == 1


def test_address_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """192.0.2.0/24 is set aside for documents: no machine has it."""
    assert main(["serve", "--dry-run", "--host", "192.0.2.1"]) == 2
    assert "choose another with --host" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--model", "/no/such/model"], ["--dry-run", "--block-size", "0"]]
    + [["--dry-run", *option.split()] for option in ABSURD],
)
def test_what_the_engine_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
    """What the server would have been started with."""
    given: list[ServerOptions] = []
    monkeypatch.setattr(
        "mini_infer.serving.server.run_server",
        lambda engine, host, port, options: given.append(options),
    )
    return given


def test_the_servers_options_have_the_same_defaults_everywhere(
    started: list[ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINI_INFER_API_KEY", raising=False)
    assert main(["serve", "--dry-run", "--port", "0"]) == 0
    gc.unfreeze()
    assert started == [ServerOptions()]


def test_the_servers_options_reach_it(started: list[ServerOptions], tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    options = (
        "--api-key a --api-key b --allowed-origin https://x.example --allowed-origin * "
        f"--max-body-size 2MiB --max-num-queued 7 --request-timeout 1.5 --access-log "
        f"--log-interval 0 --otlp-endpoint http://localhost:4318 "
        f"--profile-folder {folder} --tool-call-parser hermes --router least_loaded"
    )
    assert main(["serve", "--dry-run", "--port", "0", *options.split()]) == 0
    gc.unfreeze()
    assert started == [
        ServerOptions(
            api_keys=("a", "b"),
            allowed_origins=("https://x.example", "*"),
            max_body_size=2 * 2**20,
            max_num_queued=7,
            request_timeout=1.5,
            tool_call_parser="hermes",
            router="least_loaded",
            profile_folder=folder,
            access_log=True,
            log_interval=0,
            otlp_endpoint="http://localhost:4318",
        )
    ]
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["--replicas", "--data-parallel-size"])
def test_replicas_have_vllms_name_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(
        "mini_infer.serving.server.run_server",
        lambda starters, host, port, options: counts.append(len(starters.each)),
    )
    assert main(["serve", "--dry-run", "--port", "0", name, "3"]) == 0
    gc.unfreeze()
    assert counts == [3]


@pytest.mark.parametrize(("arguments", "keys"), [([], ("a", "d")), (["--api-key", "x"], ("x",))])
def test_keys_from_the_environment(
    started: list[ServerOptions],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    keys: tuple[str, ...],
) -> None:
    monkeypatch.setenv("MINI_INFER_API_KEY", "a, d")
    assert main(["serve", "--dry-run", "--port", "0", *arguments]) == 0
    gc.unfreeze()
    assert started[0].api_keys == keys


@pytest.mark.parametrize(
    "option",
    [
        "--max-body-size much",
        "--max-body-size 0",
        f"--max-body-size {'9' * 400}e",
        "--max-num-queued 0",
        "--max-num-queued many",
        "--request-timeout 0",
        "--request-timeout -1",
        "--request-timeout nan",
        "--request-timeout soon",
        "--allowed-origin example.com",
        "--api-key=",
        "--profile-folder /proc/no/such",
        "--profile-folder /dev/null",
    ],
)
def test_options_of_the_server_that_cant_work(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--dry-run", "--port", "0", *option.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert option.split("=")[0].split()[0] in error


def test_an_empty_key_in_the_environment_is_no_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINI_INFER_API_KEY", "a,,b")
    assert main(["serve", "--dry-run", "--port", "0"]) == 2
    assert "--api-key" in capsys.readouterr().err


def test_collector_is_paused_while_starting_and_not_after() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_collector_runs_again_after_a_failed_start() -> None:
    with pytest.raises(InvalidConfigError), collector_paused():
        raise InvalidConfigError("no")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_dry_run_serves_without_torch_and_ends_on_a_signal(ending: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--dry-run", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            first, second = process.stdout.readline(), process.stdout.readline()
            assert first.startswith("dry run (invented tokens) is served at http://127.0.0.1:")
            assert second == "chat page at /, API at /v1, Ctrl-C stops\n"
            url = first.split()[-1]
            answer = post(
                f"{url}/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
            )
            assert answer["usage"]["completion_tokens"] == 5
            assert answer["model"] == "dry-run"
            process.send_signal(ending)
            assert process.wait(30) == 0
            assert process.stdout.read().splitlines() == ["[]"]
            assert process.stderr.read() == ""
        finally:
            process.kill()
