"""Fields that the server does not read: each is refused, a label, or logged once as unknown."""

import logging
from typing import Any

import pytest

from mini_infer.serving import other_fields
from mini_infer.serving.other_fields import LABELS, REFUSED, tell_unknown
from mini_infer.serving.schema import ChatCompletionRequest, CompletionRequest
from tests.serving.live import CHAT, COMPLETIONS, LiveServer

SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
BOS = 256
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_fields, "_told", set())


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_unknown_field_is_logged_once(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert server.chat(max_token=4, user="me", echo=False, **SHORT).status_code == 200
            assert server.complete(tempurature=1, tools=[], **SHORT).status_code == 200
            fields = {"max_output_tokens": 4, "seeed": 1, "include": [], "truncation": "disabled"}
            answer = server.client.post("/v1/responses", json={"input": "Hello", **fields})
            assert answer.status_code == 200
    assert told(caplog) == [
        f"requests have a field {name!r}, which is unknown and ignored"
        for name in ("max_token", "tempurature", "seeed")
    ]


def test_the_log_can_not_be_filled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            tell_unknown([f"{'x' * 5000}{number}", f"\n{number}"])
    assert len(told(caplog)) == other_fields.MAX_TOLD
    assert all(len(line) < 200 and "\n" not in line for line in told(caplog))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_asks_for_nothing_is_no_fault(
    server: LiveServer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with caplog.at_level(logging.WARNING):
        for value in (None, *REFUSED[name]):
            assert server.complete(**{name: value}, **SHORT).status_code == 200
    assert not told(caplog)
    answer = server.complete(**{name: "?"}, **SHORT)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_no_field_is_in_two_tables() -> None:
    assert not LABELS & REFUSED.keys()
    fields = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert not fields & (LABELS | REFUSED.keys())


def test_special_tokens_are_added_where_they_are_asked_for(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = server.tokenizer.encode

    def with_first_token(text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + encode(text)

    monkeypatch.setattr(server.tokenizer, "encode", with_first_token)
    body = {**SHORT, "return_token_ids": True}
    chat: dict[str, Any] = {**body, "messages": HELLO}
    text: dict[str, Any] = {**body, "prompt": "Hello", "echo": True, "logprobs": 0}
    for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        is_chat_prefixed = fields.get("add_special_tokens", False)
        answer = server.client.post(CHAT, json=chat | fields).json()
        assert (answer["prompt_token_ids"][0] == BOS) is is_chat_prefixed
        assert answer["prompt_token_ids"][1] != BOS
        assert (
            server.stream(CHAT, **chat, **fields)[0]["prompt_token_ids"]
            == (answer["prompt_token_ids"])
        )
        prompt = [BOS] * fields.get("add_special_tokens", True) + [*b"Hello"]
        [choice] = server.client.post(COMPLETIONS, json=text | fields).json()["choices"]
        assert choice["prompt_token_ids"] == prompt
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 4
        told = server.stream(COMPLETIONS, **text, **fields)[0]["choices"][0]
        assert told["prompt_token_ids"] == prompt
