"""Tools and thoughts in chat answers, from a dry run that says a given text."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.serving.chat import chat_prompt
from mini_infer.serving.schema import ChatCompletionRequest
from tests.serving.live import CHAT, MODEL, LiveServer, live_server
from tests.serving.scripted import HERMES, say, use_template

HELLO = [{"role": "user", "content": "Weather in Köln?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
PROMPTS: list[str] = []


@pytest.fixture(scope="module")
def thinker() -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch, live_server(max_model_len=4096) as server:
        use_template(patch, server.tokenizer, HERMES, PROMPTS)
        yield server


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream's deltas."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert set(call) == {"index", "id", "type", "function"}
                message["tool_calls"].append((call["function"]["name"], ""))
            assert "name" not in call["function"] or "id" in call
            name, arguments = message["tool_calls"][call["index"]]
            message["tool_calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
    message["finish_reason"] = events[-1]["choices"][0]["finish_reason"]
    return message


def both(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """The message of an answer, which a stream of the same request must equal."""
    body = {"messages": HELLO, "temperature": 0, **fields}
    response = server.client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    message = choice["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    whole = {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": calls,
        "finish_reason": choice["finish_reason"],
    }
    assert assembled(server.stream(CHAT, **body)) == whole
    return {**whole, "content": message["content"]}


def test_a_call(thinker: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, CALL)
    message = both(thinker, tools=[WEATHER])
    assert message["tool_calls"] == [("weather", '{"city": "Köln"}')]
    assert message["content"] is None
    assert message["finish_reason"] == "tool_calls"
    assert '"name": "weather"' in PROMPTS[-1]


def test_calls_beside_text_and_thoughts(
    thinker: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}")
    message = both(thinker, tools=[WEATHER], tool_choice="auto")
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "I look."
    assert len(message["tool_calls"]) == 2
    one = both(thinker, tools=[WEATHER], parallel_tool_calls=False, include_reasoning=False)
    assert len(one["tool_calls"]) == 1
    assert one["reasoning_content"] == ""


def test_no_call_where_none_is_wanted(thinker: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, CALL)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
        message = both(thinker, **fields)
        assert message["content"] == CALL
        assert message["finish_reason"] == "stop"
        assert "weather" not in PROMPTS[-1]


def test_a_call_that_is_cut_off_is_text(
    thinker: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, CALL)
    message = both(thinker, tools=[WEATHER], max_tokens=30)
    assert message["tool_calls"] == []
    assert message["content"] == CALL[:30]
    assert message["finish_reason"] == "length"


@pytest.mark.parametrize("num_top", [None, 2])
def test_every_token_has_its_logprobs_and_id_once(
    thinker: LiveServer, monkeypatch: pytest.MonkeyPatch, num_top: int | None
) -> None:
    say(monkeypatch, f"<think>Hm.</think> {CALL}")
    fields = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    body = {"messages": HELLO, "temperature": 0, "top_logprobs": num_top, **fields}
    [choice] = thinker.client.post(CHAT, json=body).json()["choices"]
    events = [event["choices"][0] for event in thinker.stream(CHAT, **body)]
    entries = [
        item for event in events for item in (event["logprobs"] or {"content": []})["content"]
    ]
    assert entries == choice["logprobs"]["content"]
    assert [item for event in events for item in event.get("token_ids", ())] == choice["token_ids"]


def test_a_result_goes_back_to_the_model(
    thinker: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "12 degrees.")
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]
    message = both(thinker, messages=messages, tools=[WEATHER])
    assert message["content"] == "12 degrees."
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}' in PROMPTS[-1]
    assert "<|im_start|>tool\n12<|im_end|>" in PROMPTS[-1]


def test_thinking_can_be_switched_off(thinker: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "Yes.")
    message = both(thinker, chat_template_kwargs={"enable_thinking": False})
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "")
    assert PROMPTS[-1].endswith("</think>\n\n")


def test_thoughts_that_the_template_opens(
    thinker: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "Hm, so\n</think>\n\nYes.")
    message = both(thinker, chat_template_kwargs={"open_thinking": True})
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm, so")
    cut = both(thinker, chat_template_kwargs={"open_thinking": True}, max_tokens=3)
    assert (cut["content"], cut["reasoning_content"]) == (None, "Hm,")


def test_names_and_thoughts_reach_the_template(
    thinker: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{% for m in messages %}{{ m.role, m.name, m.reasoning_content }}{% endfor %}"
    prompts: list[str] = []
    use_template(monkeypatch, thinker.tokenizer, source, prompts)
    messages = [
        {"role": "user", "name": "Ann", "content": "Hi", "reasoning": "no field of a user's"},
        {"role": "assistant", "content": "Hm.", "reasoning": "one"},
        {"role": "assistant", "content": "Hm.", "reasoning": "one", "reasoning_content": "two"},
    ]
    body = {"messages": messages, "max_tokens": 1}
    assert thinker.client.post(CHAT, json=body).status_code == 200
    assert prompts[0].split(")(")[0] == "('user', 'Ann', Undefined"
    assert "('assistant', Undefined, 'one')('assistant', Undefined, 'two')" in prompts[0]


def test_a_template_without_tools_refuses_them(
    thinker: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, thinker.tokenizer, "{{ messages }}")
    function = {"name": "f", "arguments": "{}"}
    called = [{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]
    for fields, param, text in (
        ({"messages": HELLO, "tools": [WEATHER]}, "tools", "has no place for them"),
        ({"messages": called}, "messages", "does not show them"),
    ):
        response = thinker.client.post(CHAT, json=fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert text in response.json()["error"]["message"]


def test_a_dry_run_knows_tools_too(monkeypatch: pytest.MonkeyPatch, server: LiveServer) -> None:
    say(monkeypatch, CALL)
    function = {"name": "weather", "arguments": "{}"}
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]
    message = both(server, messages=messages, tools=[WEATHER])
    assert message["tool_calls"] == [("weather", '{"city": "Köln"}')]


def test_a_form_that_is_not_known_is_refused(
    thinker: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, thinker.tokenizer, "{{ tools }}[TOOL_CALLS]")
    response = thinker.chat(tools=[WEATHER])
    assert response.status_code == 400
    assert "a form that is not known" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("special", "fields", "skips"),
    [
        ("<tool_call>", {"tools": [WEATHER]}, False),
        ("<tool_call>", {"tools": [WEATHER], "skip_special_tokens": True}, True),
        ("<tool_call>", {}, True),
        ("<think>", {}, False),
        ("other", {"tools": [WEATHER]}, True),
    ],
)
def test_tags_that_are_special_tokens_stay_in_the_text(
    monkeypatch: pytest.MonkeyPatch, special: str, fields: dict[str, Any], skips: bool
) -> None:
    tokenizer = ByteTokenizer()
    use_template(monkeypatch, tokenizer, HERMES)
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer,
        "encode",
        lambda text, add_special_tokens=True: [258] if text == special else encode(text),
    )
    body = ChatCompletionRequest(messages=HELLO, **fields)
    chat_prompt(tokenizer, body)
    assert body.sampling_params().skip_special_tokens == skips


def test_openais_client(thinker: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, f"Well.\n{CALL}")
    messages: Any = HELLO
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=[WEATHER]
        ) as stream:
            final = stream.get_final_completion()
    for choice in (answer.choices[0], final.choices[0]):
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.arguments == '{"city": "Köln"}'
        assert choice.message.content == "Well."
        assert choice.finish_reason == "tool_calls"
