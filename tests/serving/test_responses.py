"""POST /v1/responses against a dry-run server, by HTTP and by OpenAI's client."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mini_infer.core.errors import MiniInferError
from tests.serving.live import MODEL, LiveServer
from tests.serving.scripted import HERMES, say, use_template

RESPONSES = "/v1/responses"
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 24}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    response = server.client.post(RESPONSES, json={"input": "Hello", "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one request to the next."""
    text = re.sub(r"(resp|msg|rs)_[0-9a-f]{32}", r"\1", json.dumps(response))
    cached = {"input_tokens_details": None}
    whole: dict[str, Any] = json.loads(text) | {"created_at": 0}
    return whole | {"usage": whole["usage"] | cached}


def test_an_answer_has_the_shape_of_openais(server: LiveServer) -> None:
    body = {"input": "Hello", "instructions": "Be brief.", "metadata": {"a": "b"}, **GREEDY}
    answer = server.client.post(RESPONSES, json={**body, "store": False}).json()
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["model"]) == ("response", MODEL)
    assert (answer["status"], answer["store"]) == ("incomplete", False)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["metadata"] == {"a": "b"}
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    chat = server.client.post(
        "/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 24}
    ).json()
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    usage = answer["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 24
    assert usage["total_tokens"] == usage["input_tokens"] + 24


def test_a_list_of_messages(server: LiveServer) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Hi.", "annotations": []},
                {"type": "refusal", "refusal": "No."},
            ],
        },
        {"role": "user", "content": "And now?"},
    ]
    answer = server.client.post(RESPONSES, json={"input": items, **GREEDY}).json()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi.\nNo."},
        {"role": "user", "content": "And now?"},
    ]
    prompt = server.tokenizer.apply_chat_template(messages)
    assert answer["usage"]["input_tokens"] == len(server.tokenizer.encode(prompt))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": None},
        {"temperature": 1, "seed": 3, "top_p": 0.9, "stop": ["e "]},
        {"instructions": "x", "top_k": 4},
    ],
    ids=str,
)
def test_the_last_event_is_the_answer(server: LiveServer, fields: dict[str, Any]) -> None:
    body = {**GREEDY, **fields}
    whole = server.client.post(RESPONSES, json={"input": "Hello", **body}).json()
    events = events_of(server, **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_names(events[-1]["response"]) == without_names(whole)
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == whole["output"][0]["content"][0]["text"]
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {events[-1]["response"]["output"][0]["id"]}


@pytest.mark.parametrize(
    ("text", "max_tokens", "kinds", "num_thoughts"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", None, ["reasoning", "message"], 20),
        ("<think>\nHm.\n</think>\n\nYes.", 10, ["reasoning"], 10),
        ("<think></think>Yes.", None, ["message"], 0),
        ("", None, ["message"], 0),
    ],
)
def test_thoughts_are_an_item_of_their_own(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    max_tokens: int | None,
    kinds: list[str],
    num_thoughts: int,
) -> None:
    say(monkeypatch, text)
    body = {"temperature": 0, "max_output_tokens": max_tokens}
    whole = server.client.post(RESPONSES, json={"input": "Hello", **body}).json()
    assert [item["type"] for item in whole["output"]] == kinds
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == num_thoughts
    events = events_of(server, **body)
    assert without_names(events[-1]["response"]) == without_names(whole)
    for index, item in enumerate(whole["output"]):
        name = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
        told = [
            event["delta"]
            for event in events
            if event["type"] == f"{name[item['type']]}.delta" and event["output_index"] == index
        ]
        assert "".join(told) == item["content"][0]["text"]


def test_earlier_thoughts_reach_the_template(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    template = HERMES.replace("message.content", "message.reasoning_content|default('') + '|'")
    use_template(monkeypatch, server.tokenizer, template, prompts)
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Yes."},
    ]
    assert server.client.post(RESPONSES, json={"input": items, **GREEDY}).status_code == 200
    assert "assistant\nHm.|" in prompts[-1]


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "store", "keeps no answers"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
    ({"conversation": "conv_1"}, "conversation", "keeps no answers"),
    ({"background": True}, "background", "keeps no answers"),
    ({"tools": [{"type": "web_search"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tools", "there are no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "must be 'none'"),
    ({"tools": [{"type": "function"}]}, "tools", "name must be a string"),
    ({"tools": [{**TOOL, "parameters": {"not": {}}}], "tool_choice": "required"}, "tools", "not"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text", "format.schema"),
    ({"text": {"format": "json"}}, "text", "must be an object"),
    ({"response_format": {"type": "json_object"}}, "response_format", "called text.format"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input", "input[0].call_id"),
    ({"previous_input_messages": ["x"]}, "previous_input_messages", "not supported"),
    ({"enable_response_messages": True}, "enable_response_messages", "not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"prompt": {"id": "x"}}, "prompt", "not supported"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format"),
    ({"text": {"verbosity": "low"}}, "text", "text.verbosity"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1 or more"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"messages": []}, "messages", "input"),
    ({"n": 2}, "n", "only supported by /v1/chat/completions"),
    ({"return_token_ids": True}, "return_token_ids", "only supported by"),
    ({"temperature": -1}, "temperature", "0 or more"),
    ({"service_tier": "flex"}, "service_tier", "not supported"),
    ({"metadata": {"a": 5}}, "metadata", "string"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
    ({"metadata": dict.fromkeys("abcdefghijklmnopq", "")}, "metadata", "at most 16"),
    ({"input": []}, "input", "empty"),
    ({"input": 5}, "input", "string"),
    ({"input": ["Hello"]}, "input", "dictionary"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input", "'critic'"),
    ({"input": [{"role": "user"}]}, "input", "content"),
    ({"input": [{"type": "function_call_output"}]}, "input", "input[0].output must be"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input", "'str'"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options", "last event"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "text"), REFUSED, ids=str)
def test_what_cannot_be_honoured_is_refused(
    server: LiveServer, fields: dict[str, Any], param: str, text: str, stream: bool
) -> None:
    body = {"input": "Hello", "stream": stream, **fields}
    response = server.client.post(RESPONSES, json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param, error
    assert text in error["message"]


def test_what_a_template_refuses_is_the_inputs_fault(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, server.tokenizer, "{{ raise_exception('no') }}")
    error = server.client.post(RESPONSES, json={"input": "Hello"}).json()["error"]
    assert error["param"] == "input"


@pytest.mark.parametrize(
    "fields",
    [
        {"store": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"text": {"format": {"type": "text"}}},
        {"reasoning": {}, "truncation": "disabled", "include": [], "background": False},
        {"user": "someone", "prompt_cache_key": "x", "service_tier": "auto", "n": 1},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_accepted(server: LiveServer, fields: dict[str, Any]) -> None:
    response = server.client.post(RESPONSES, json={"input": "Hello", **GREEDY, **fields})
    assert response.status_code == 200, response.text


def test_text_that_cannot_be_sent_is_refused(server: LiveServer) -> None:
    for field in ('"metadata": {"a": "\\ud800"}', '"instructions": "\\ud800"'):
        response = server.client.post(
            RESPONSES,
            content=f'{{"input": "Hello", {field}}}',
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 400
        assert "surrogate" in response.json()["error"]["message"]


def test_another_model_is_not_found(server: LiveServer) -> None:
    response = server.client.post(RESPONSES, json={"input": "Hello", "model": "gpt-5"})
    assert response.status_code == 404


@pytest.mark.parametrize("error", [MiniInferError("out of luck"), RuntimeError("a secret")])
def test_a_failure_on_the_way_is_the_last_event(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stream = server.async_engine.stream

    async def failing(*args: Any, **kwargs: Any) -> Any:
        async for deltas in stream(*args, **kwargs):
            yield deltas
            raise error

    monkeypatch.setattr(server.async_engine, "stream", failing)
    *_, last = events_of(server, **GREEDY)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(last)
    server.wait_until_idle()


def test_openais_client(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", temperature=0)
    assert answer.output_text.endswith(".")
    assert answer.usage is not None
    events = list(client.responses.create(model=MODEL, input="Hello", temperature=0, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == answer.output_text
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == answer.usage.output_tokens


def test_openais_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hello", temperature=0) as stream:
        final = stream.get_final_response()
    answer = client.responses.create(model=MODEL, input="Hello", temperature=0)
    assert final.output_text == answer.output_text
    again = client.responses.create(
        model=MODEL,
        input=[*answer.output, {"role": "user", "content": "And now?"}],  # type: ignore[list-item]
        max_output_tokens=3,
    )
    assert again.status == "incomplete"


def test_openais_client_sees_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hello", store=True)
    assert refused.value.param == "store"
