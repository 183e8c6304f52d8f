"""vLLM's extras of a request, in answers and in streams."""

from typing import Any

import pytest

from tests.serving.live import CHAT, COMPLETIONS, LiveServer
from tests.serving.scripted import HERMES, use_template

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello"}]
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def token_ids_of(events: list[dict[str, Any]], index: int = 0) -> list[int]:
    return [
        token_id
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
        for token_id in choice.get("token_ids", ())
    ]


@pytest.mark.parametrize("fields", [{}, {"stop": "e ", "n": 2, "temperature": 1, "seed": 3}])
def test_chat_returns_token_ids(server: LiveServer, fields: dict[str, Any]) -> None:
    body = {**GREEDY, "return_token_ids": True, **fields}
    answer = server.chat(**body).json()
    prompt = server.tokenizer.apply_chat_template(HELLO)
    assert answer["prompt_token_ids"] == server.tokenizer.encode(prompt, False)
    events = server.stream(CHAT, messages=HELLO, **body)
    told = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    assert told == [answer["prompt_token_ids"]]
    assert "prompt_token_ids" in events[0]
    for choice in answer["choices"]:
        assert choice["token_ids"] == token_ids_of(events, choice["index"])
    assert len(answer["choices"][0]["token_ids"]) <= 24
    assert "token_ids" not in server.chat(**GREEDY).text


def test_completions_return_token_ids(server: LiveServer) -> None:
    body = {**GREEDY, "return_token_ids": True, "n": 2}
    answer = server.complete([list(b"One"), [72, 105]], **body).json()
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [[79, 110, 101]] * 2 + [[72, 105]] * 2
    events = server.stream(COMPLETIONS, prompt=[list(b"One"), [72, 105]], **body)
    for choice in answer["choices"]:
        index = choice["index"]
        assert choice["token_ids"] == token_ids_of(events, index)
        told = [
            item["prompt_token_ids"]
            for event in events
            for item in event["choices"]
            if item["index"] == index and "prompt_token_ids" in item
        ]
        assert told == [choice["prompt_token_ids"]]


def test_usage_with_every_chunk(server: LiveServer) -> None:
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello"})):
        *events, last = server.stream(path, **prompt, **GREEDY, **USAGE)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == last["usage"]["completion_tokens"] == 24
        for event in events:
            usage = event["usage"]
            assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    first, *_ = server.stream(CHAT, messages=HELLO, **GREEDY, **USAGE)
    assert first["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("tier", ["auto", "default"])
def test_the_tier_that_served_is_told(server: LiveServer, tier: str) -> None:
    fields = {**GREEDY, "service_tier": tier}
    assert server.chat(**fields).json()["service_tier"] == "default"
    assert server.complete(**fields).json()["service_tier"] == "default"
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello"})):
        events = server.stream(path, **prompt, **fields)
        assert {event["service_tier"] for event in events} == {"default"}
    assert "service_tier" not in server.chat(**GREEDY).json()


@pytest.mark.parametrize("prompt", ["One two three", list(b"One two three")])
def test_the_end_of_a_prompt_can_be_kept(server: LiveServer, prompt: Any) -> None:
    body = {**GREEDY, "return_token_ids": True}
    answer = server.complete(prompt, truncate_prompt_tokens=5, **body).json()
    assert answer["choices"][0]["prompt_token_ids"] == list(b"three")
    assert answer["usage"]["prompt_tokens"] == 5
    assert (
        answer["choices"][0]["text"]
        == server.complete("three", **body).json()["choices"][0]["text"]
    )
    events = server.stream(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=5, **body)
    assert events[0]["choices"][0]["prompt_token_ids"] == list(b"three")


@pytest.mark.parametrize("length", [5000, 200_000])
def test_a_prompt_is_cut_to_the_room_beside_the_output(server: LiveServer, length: int) -> None:
    fields = {"truncate_prompt_tokens": -1, "max_tokens": 10, "ignore_eos": True}
    usage = server.complete("x" * length, **fields).json()["usage"]
    assert usage["prompt_tokens"] == 4086
    usage = server.chat("x" * length, **fields).json()["usage"]
    assert usage["prompt_tokens"] == 4086
    assert server.chat(**fields).json()["usage"]["prompt_tokens"] < 100


def test_a_final_message_is_continued(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        "messages": [*HELLO, {"role": "assistant", "content": "Well, "}],
        "continue_final_message": True,
        **GREEDY,
    }
    answer = server.client.post(CHAT, json=body).json()
    prompt = server.tokenizer.apply_chat_template(HELLO) + "Well, "
    assert answer["usage"]["prompt_tokens"] == len(server.tokenizer.encode(prompt))
    text = server.complete(prompt, **GREEDY).json()["choices"][0]["text"]
    assert answer["choices"][0]["message"]["content"] == text

    template = HERMES.replace("message.content", "message.content | trim")
    prompts: list[str] = []
    use_template(monkeypatch, server.tokenizer, template, prompts)
    token_ids = server.client.post(CHAT, json={**body, "return_token_ids": True}).json()
    shown = server.tokenizer.decode(token_ids["prompt_token_ids"])
    assert shown.endswith("assistant\nWell,")


def test_a_message_that_the_template_drops_is_not_continued(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, server.tokenizer, "nothing")
    response = server.chat(continue_final_message=True)
    assert response.status_code == 400
    assert "does not show the final message" in response.json()["error"]["message"]
