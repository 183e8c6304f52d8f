"""Endpoints of whoever runs the server: probes, the prefix cache, profiles, tokens."""

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_infer.serving.options import ServerOptions
from mini_infer.serving.server_metrics import ServerMetrics
from tests.serving.live import MODEL, LiveServer, live_server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def profiled(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(ServerOptions(profile_folder=tmp_path / "new" / "folder")) as server:
        yield server


def test_ping(server: LiveServer) -> None:
    assert server.client.get("/ping").json() == {"status": "ok"}


def test_resetting_the_prefix_cache(server: LiveServer) -> None:
    prompt = "A prompt of more than two blocks, which is then forgotten."

    def cached() -> bool:
        usage = server.complete(prompt, **GREEDY).json()["usage"]
        return bool(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [False, True]
    assert server.client.post("/reset_prefix_cache").json() == {"status": "ok"}
    assert [cached(), cached()] == [False, True]


def test_what_takes_long_leaves_the_event_loop_alone(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                seen.append(function.__name__)
            return function(*args, **kwargs)

        return call

    for name in ("encode", "token_bytes"):
        monkeypatch.setattr(server.tokenizer, name, noting(getattr(server.tokenizer, name)))
    monkeypatch.setattr(ServerMetrics, "render", noting(ServerMetrics.render))
    assert server.client.get("/metrics").status_code == 200
    for prompt, expected in (("Hello", ["encode", "token_bytes"]), ("Hello " * 2000, [])):
        body = {"prompt": prompt, "return_token_strs": True}
        assert server.client.post("/tokenize", json=body).json()["count"] == len(prompt)
        assert list(dict.fromkeys(seen)) == expected
        seen.clear()


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiles_are_off_unless_a_folder_is_given(server: LiveServer, path: str) -> None:
    response = server.client.post(path)
    assert response.status_code == 404
    assert "--profile-folder" in response.json()["error"]["message"]


def test_a_profile_is_a_trace_of_the_steps(profiled: LiveServer, tmp_path: Path) -> None:
    assert profiled.client.post("/stop_profile").status_code == 400
    assert profiled.client.post("/start_profile").json() == {"status": "recording"}
    again = profiled.client.post("/start_profile")
    assert again.status_code == 400
    assert "stop it first" in again.json()["error"]["message"]
    profiled.chat(**GREEDY)
    answer = profiled.client.post("/stop_profile").json()
    trace = tmp_path / "new" / "folder" / answer["file"]
    assert "traceEvents" in json.loads(gzip.decompress(trace.read_bytes()))
    assert profiled.chat(**GREEDY).status_code == 200


# --- tokens


@pytest.mark.parametrize("text", ["Hello", "", "caf\u00e9 \U0001f600", "<|im_end|>x", "x" * 9000])
def test_tokens_there_and_back(server: LiveServer, text: str) -> None:
    answer = server.client.post("/tokenize", json={"prompt": text}).json()
    assert answer["tokens"] == server.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert (answer["max_model_len"], answer["token_strs"]) == (4096, None)
    body = {"tokens": answer["tokens"], "model": MODEL}
    assert server.client.post("/detokenize", json=body).json() == {"prompt": text}


def test_tokens_of_messages_are_those_of_a_chat(server: LiveServer) -> None:
    body = {"messages": HELLO, "return_token_strs": True}
    answer = server.client.post("/tokenize", json=body).json()
    usage = server.chat("Hello", max_tokens=1).json()["usage"]
    assert answer["count"] == usage["prompt_tokens"]
    assert "".join(answer["token_strs"]) == server.tokenizer.decode(
        answer["tokens"], skip_special_tokens=False
    )
    body = {"messages": HELLO, "add_generation_prompt": False}
    assert server.client.post("/tokenize", json=body).json()["count"] < answer["count"]


def test_special_tokens_are_the_callers_choice(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(server.tokenizer, "encode", encode)
    for kind in ({"prompt": "x"}, {"messages": HELLO}):
        for choice in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            server.client.post("/tokenize", json=kind | choice)
    assert seen == [True, True, False, False, True, False]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ("/tokenize", {"messages": HELLO, "add_generation_prompt": 7}, "add_generation_prompt"),
        ("/tokenize", {"messages": HELLO, "audio": {}}, "audio"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, 99999999]}, "tokens"),
    ],
    ids=str,
)
def test_bad_input(server: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    response = server.client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model(server: LiveServer, path: str) -> None:
    body = {"model": "gpt-4o", "prompt": "x", "tokens": [1]}
    assert server.client.post(path, json=body).status_code == 404


# --- what a client may look for


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/embeddings", "embedding model"),
        ("/v1/audio/transcriptions", "speech model"),
        ("/v1/images/generations", "image model"),
        ("/v1/moderations", "moderation model"),
        ("/v1/files", "does not offer"),
        ("/v1/threads/x/runs", "does not offer"),
        ("/v1/nothing", "Not Found"),
        ("/embeddings", "embedding model"),
    ],
)
def test_endpoints_that_the_model_cant_serve(server: LiveServer, path: str, text: str) -> None:
    for response in (
        server.client.post(path, json={"input": "x", "model": MODEL}),
        server.client.post(path, files={"file": b"x"}),
        server.client.get(path),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["type"] == "not_found_error"
        assert re.search(text, error["message"])
        assert path in error["message"]
