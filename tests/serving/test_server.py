"""The other endpoints, the socket, signals, and what the dry run may import."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest

from mini_infer import __version__
from mini_infer.core.errors import InvalidConfigError
from mini_infer.serving.listener import bind
from tests.serving.live import CHAT, MODEL, PATIENCE, LiveServer, wait_for

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from mini_infer.runtime.replica_starters import ReplicaStarters
from mini_infer.serving.server import run_server
run_server(ReplicaStarters({"dry_run": True}), "127.0.0.1", 0)
heavy = ("torch", "transformers", "numpy", "jinja2", "tokenizers", "prometheus_client")
print([name for name in heavy if name in sys.modules], flush=True)
"""
SLOW_PROGRAM = PROGRAM.replace("True}", 'True, "scheduling_policy": "tests.runtime.hooks:Slow"}')


def test_models(server: LiveServer) -> None:
    listing = server.client.get("/v1/models").json()
    [card] = listing["data"]
    assert (listing["object"], card["object"], card["id"]) == ("list", "model", MODEL)
    assert card["max_model_len"] == 4096
    assert server.client.get(f"/v1/models/{MODEL}").json() == card


def test_version_and_health(server: LiveServer) -> None:
    assert server.client.get("/version").json() == {"version": __version__}
    assert server.client.get("/health").status_code == 200


def test_the_api_describes_itself(server: LiveServer) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(paths)


def test_every_operation_documents_its_errors(server: LiveServer) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            assert {"200", "4XX", "5XX"} == set(operation["responses"]), path
    assert "text/plain" in paths["/metrics"]["get"]["responses"]["200"]["content"]


def test_the_page_asks_for_a_key_only_where_one_is_needed(server: LiveServer) -> None:
    page = server.client.get("/").text
    assert re.search(r'hidden><label>API key<input [^>]*type="password"', page)
    assert page.count("headers: headers()") == 2 == page.count("fetch(")


def test_the_page_is_one_file_without_outside_resources(server: LiveServer) -> None:
    response = server.client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "/v1/chat/completions" in response.text
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://""", response.text)


def test_the_page_never_parses_the_models_text_as_html() -> None:
    page = (ROOT / "mini_infer/serving/static/index.html").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


def test_every_control_of_the_page_has_a_label() -> None:
    page = (ROOT / "mini_infer/serving/static/index.html").read_text()
    for control in re.findall(r"<(?:input|textarea)[^>]*>", page):
        name = re.search(r'id="([^"]+)"', control)
        assert name is not None
        inside_label = re.search(rf"<label>[^<]+{re.escape(control)}", page)
        assert inside_label or f'for="{name[1]}"' in page


def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InvalidConfigError, match=rf"port {port}.*in use.*--port"):
            bind("127.0.0.1", port)


def test_a_port_is_free_again_at_once() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()
    bind("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(InvalidConfigError, match=host):
        bind(host, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_dry_run_starts_answers_and_ends_cleanly(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        announcement = process.stdout.readline()
        url = announcement.split()[-1]
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            data=b'{"messages": [{"role": "user", "content": "hi"}]}',
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert response.status == 200
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, "")
    assert stdout.strip() == "[]"


def refuses_connections(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_second_signal_ends_running_requests_with_an_error_object() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=PATIENCE) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "assistant" in next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: refuses_connections(url))
            process.send_signal(signal.SIGTERM)
            *_, error, done = lines
        stderr = process.communicate(timeout=PATIENCE)[1]
    assert "the engine was shut down" in error
    assert done == "data: [DONE]"
    assert (process.returncode, stderr) == (0, "")


def test_the_first_signal_lets_running_requests_finish_and_refuses_new_ones() -> None:
    message = {"messages": [{"role": "user", "content": "hi"}]}
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        content = json.dumps(message).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        body = message | {"ignore_eos": True, "max_tokens": 60, "stream": True}
        with (
            socket.create_connection(address) as late,
            httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=PATIENCE) as response,
        ):
            late.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode())
            lines = (line for line in response.iter_lines() if line)
            assert "assistant" in next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: refuses_connections(url))
            late.sendall(content)
            answer = b""
            while piece := late.recv(4096):
                answer += piece
            *_, finish, done = lines
        stderr = process.communicate(timeout=PATIENCE)[1]
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in answer
    assert b"shutting down" in answer
    assert '"finish_reason":"length"' in finish
    assert done == "data: [DONE]"
    assert (process.returncode, stderr) == (0, "")


def test_clients_that_neither_read_nor_send_the_rest_do_not_hold_up_the_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        body = (
            b'{"messages": [{"role": "user", "content": "hi"}], "stream": true, "n": 8, '
            b'"ignore_eos": true, "logprobs": true, "top_logprobs": 5}'
        )
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with (
            socket.create_connection(address) as deaf,
            socket.create_connection(address) as slow,
        ):
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert deaf.recv(8).startswith(b"HTTP")
            slow.sendall(f"{head}Content-Length: 5000\r\n\r\n{{".encode())
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: refuses_connections(url))
            process.send_signal(signal.SIGTERM)
            stderr = process.communicate(timeout=5)[1]
    assert (process.returncode, stderr) == (0, "")
