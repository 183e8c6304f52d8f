"""What stands before the routes: request ids, access log, CORS, API keys, the size of bodies."""

import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mini_infer.core.errors import InvalidConfigError
from mini_infer.serving.options import ServerOptions
from tests.serving.live import CHAT, COMPLETIONS, LiveServer, live_server

LIMIT = 2000
ORIGIN = "https://app.example"
OPTIONS = ServerOptions(
    api_keys=("first-key", "schl\u00fcssel"),
    allowed_origins=(ORIGIN,),
    max_body_size=LIMIT,
    access_log=True,
)
KEY = {"authorization": "Bearer first-key"}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def gated() -> Iterator[LiveServer]:
    with live_server(OPTIONS) as server:
        yield server


@pytest.fixture
def access_log() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mini_infer.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


# --- API keys


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "first-key",
        "Basic first-key",
        "Bearer first-ke",
        "Bearer first-key2",
        "Bearer FIRST-KEY",
        b"Bearer \xff\xfe",
        "Bearer first-key, Bearer other",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/start_profile"),
        ("GET", "/openapi.json"),
        ("GET", "/no/such/path"),
        ("GET", "/health/"),
    ],
)
def test_without_a_valid_key_nothing_is_told(
    gated: LiveServer, method: str, path: str, header: str | bytes | None
) -> None:
    headers = {} if header is None else {b"authorization": header}
    response = gated.client.request(method, path, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert "first" not in response.text


@pytest.mark.parametrize("key", ["first-key", "schl\u00fcssel"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens(gated: LiveServer, scheme: str, key: str) -> None:
    headers = {b"authorization": f"{scheme} {key}".encode()}
    response = gated.client.post(CHAT, json=HELLO, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/version", "/metrics"])
def test_probes_and_the_page_need_no_key(gated: LiveServer, path: str) -> None:
    assert gated.client.get(path).status_code == 200


def test_without_keys_everybody_is_served(server: LiveServer) -> None:
    assert server.client.get("/v1/models", headers={"authorization": "Bearer x"}).is_success


# --- CORS


def preflight(server: LiveServer, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return server.client.options(CHAT, headers=headers)


def test_pages_of_an_allowed_origin_may_use_the_api(gated: LiveServer) -> None:
    answer = preflight(gated, ORIGIN)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"]
    headers = {"origin": ORIGIN}
    for extra, status in ((KEY, 200), ({}, 401)):
        response = gated.client.post(CHAT, json=HELLO, headers=headers | extra)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN


def test_other_pages_may_not(gated: LiveServer, server: LiveServer) -> None:
    assert preflight(gated, "https://evil.example").status_code == 400
    for live in (gated, server):
        headers = KEY | {"origin": "https://evil.example"}
        response = live.client.post(CHAT, json=HELLO, headers=headers)
        assert "access-control-allow-origin" not in response.headers


# --- request ids and the access log


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", CHAT])
def test_every_answer_has_an_id(gated: LiveServer, path: str) -> None:
    ids = [gated.client.get(path).headers["x-request-id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert re.fullmatch("[0-9a-f]{32}", ids[0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_callers_id_comes_back(gated: LiveServer, stream: bool) -> None:
    headers = KEY | {"x-request-id": "caller-17"}
    response = gated.client.post(CHAT, json=HELLO | {"stream": stream}, headers=headers)
    assert response.status_code == 200
    assert response.headers.get_list("x-request-id") == ["caller-17"]


@pytest.mark.parametrize("value", ["", "a b", "x" * 129, "\xe9"])
def test_an_id_that_would_break_a_log_is_replaced(gated: LiveServer, value: str) -> None:
    headers = {b"x-request-id": value.encode()}
    answer = gated.client.get("/health", headers=headers).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", answer)


def test_a_fault_has_an_id_too(gated: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise RuntimeError

    monkeypatch.setattr(gated.tokenizer, "apply_chat_template", fail)
    # A connection of its own, as the server closes it after a fault.
    headers = KEY | {"x-request-id": "faulty"}
    response = httpx.post(f"{gated.url}{CHAT}", json=HELLO, headers=headers)
    assert (response.status_code, response.headers["x-request-id"]) == (500, "faulty")


def test_a_line_of_the_access_log(gated: LiveServer, access_log: list[str]) -> None:
    headers = KEY | {"x-request-id": "abc"}
    gated.client.post(f"{CHAT}?secret=1", json=HELLO, headers=headers)
    gated.client.get("/with%0Abreak", headers=headers)
    gated.client.get("/health")  # the line of a request is written after its answer
    assert re.fullmatch(rf'127\.0\.0\.1:\d+ "POST {CHAT}" 200 \d+\.\d ms abc', access_log[0])
    assert '"GET /with%0Abreak" 404 ' in access_log[1]


def test_no_access_log_unless_asked_for(server: LiveServer, access_log: list[str]) -> None:
    server.client.get("/health")
    server.client.get("/health")
    assert access_log == []


# --- size of the body


def address(server: LiveServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def body_of(size: int) -> bytes:
    body = json.dumps(HELLO | {"user": ""}).encode()
    return body[:-2] + b"x" * (size - len(body)) + body[-2:]


@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413), (300_000, 413)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_have_so_many_bytes(
    gated: LiveServer, size: int, status: int, chunked: bool
) -> None:
    body = body_of(size)
    assert len(body) == size
    pieces = (body[start : start + 1000] for start in range(0, size, 1000))
    response = httpx.post(
        f"{gated.url}{CHAT}",
        content=pieces if chunked else body,
        headers=KEY | {"content-type": "application/json"},
    )
    assert response.status_code == status
    if status == 413:
        assert str(LIMIT) in response.json()["error"]["message"]
        assert response.headers["x-request-id"]


def test_a_large_body_is_refused_before_it_comes(gated: LiveServer) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first-key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {10**15}\r\n\r\n"
    )
    with socket.create_connection(address(gated)) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_without_an_end_is_cut(gated: LiveServer) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first-key\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(address(gated)) as connection:
        connection.sendall(head.encode())
        connection.sendall(b"%x\r\n%s\r\n" % (LIMIT + 1, b"x" * (LIMIT + 1)))
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("limit", ["request_timeout", "pause"])
def test_a_body_that_does_not_come_is_not_waited_for(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    if limit == "pause":
        monkeypatch.setattr("mini_infer.serving.gate.BODY_PAUSE", 0.01)
    with live_server(ServerOptions(request_timeout=60 if limit == "pause" else 0.01)) as server:
        for framing in ("Content-Length: 500\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n"):
            with socket.create_connection(address(server)) as connection:
                connection.sendall(f"{head}{framing}".encode())
                answer = b""
                while piece := connection.recv(4096):
                    answer += piece
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"0.01 seconds" in answer


# --- options


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"api_keys": ("",)}, "--api-key"),
        ({"api_keys": ("a", "b c")}, "--api-key"),
        ({"api_keys": ("a\n",)}, "--api-key"),
        ({"allowed_origins": ("example.com",)}, "--allowed-origin"),
        ({"allowed_origins": ("https://example.com/",)}, "--allowed-origin"),
        ({"max_body_size": 0}, "--max-body-size"),
        ({"max_num_queued": 0}, "--max-num-queued"),
        ({"request_timeout": 0}, "--request-timeout"),
        ({"request_timeout": float("nan")}, "--request-timeout"),
        ({"request_timeout": float("inf")}, "--request-timeout"),
    ],
    ids=str,
)
def test_options_that_cant_work(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidConfigError, match=name):
        ServerOptions(**options)
