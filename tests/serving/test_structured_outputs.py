"""Answers of a given form, by OpenAI's client and by HTTP, from a dry run that honours masks."""

import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from mini_infer.core.errors import InvalidConfigError
from mini_infer.serving.options import ServerOptions
from tests.serving.live import CHAT, COMPLETIONS, MODEL, LiveServer, live_server
from tests.serving.scripted import HERMES, say, use_template
from tests.serving.test_tools_and_reasoning import both

HELLO: Any = [{"role": "user", "content": "Hello"}]


class Weather(BaseModel):
    """How a city's weather will be."""

    city: Literal["Paris", "Köln"]
    days: int | None


class Step(BaseModel, extra="forbid"):
    what: Literal["look", "think"]


class Plan(BaseModel, extra="forbid"):
    steps: list[Step]
    sure: bool


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tool(model: type[BaseModel], strict: bool = True) -> Any:
    tool: Any = openai.pydantic_function_tool(model)
    tool["function"]["strict"] = strict
    return tool


STOP: Any = {"type": "function", "function": {"name": "stop"}}
NAMED: Any = {"type": "function", "function": {"name": "Weather"}}


def test_parse(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Plan, seed=seed, max_tokens=1000
        )
        assert isinstance(answer.choices[0].message.parsed, Plan)
        assert answer.choices[0].finish_reason == "stop"


def test_parse_of_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Plan, seed=1, max_tokens=1000
    ) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Plan)
    assert kinds.count("content.delta") > 3


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_made(client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [tool(Weather)],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 1000,
    }
    reason = "stop" if choice is NAMED else "tool_calls"
    parsed = client.chat.completions.parse(**fields).choices[0]
    assert parsed.finish_reason == reason
    [call] = parsed.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert parsed.message.content is None
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in kinds
    assert kinds.count("tool_calls.function.arguments.delta") > 5, "they come in pieces"
    assert streamed.finish_reason == reason
    [call] = streamed.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}])
def test_a_strict_tool_holds_a_call_and_leaves_text_free(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """The dry run's script is followed as far as the grammar allows."""
    begin = 'Let me see <b>. <tool_call>\n{"name": "Weather", "arguments": {"city": "Rome'
    say(monkeypatch, begin)
    strict = both(server, messages=HELLO, tools=[tool(Weather), STOP], max_tokens=400, **fields)
    assert strict["content"].startswith("Let me see <b>.")
    name, arguments = strict["tool_calls"][0]
    assert name == "Weather"
    assert isinstance(Weather.model_validate_json(arguments), Weather)
    assert strict["finish_reason"] == "tool_calls"
    free = both(server, messages=HELLO, tools=[tool(Weather, strict=False)], max_tokens=90)
    assert free["tool_calls"] == []
    assert '"city": "Rome' in free["content"]


def test_several_calls_and_one(server: LiveServer) -> None:
    bias = {"257": -100}  # the dry run ends late
    fields = {"messages": HELLO, "tools": [tool(Weather), STOP], "tool_choice": "required"}
    several = both(server, **fields, max_tokens=300, logit_bias=bias)
    assert len(several["tool_calls"]) > 1
    assert several["finish_reason"] == "length"
    for name, arguments in several["tool_calls"][:-1]:  # the last one may be cut off
        value = json.loads(arguments)
        assert Weather.model_validate(value) if name == "Weather" else value == {}
    one = both(server, **fields, max_tokens=300, logit_bias=bias, parallel_tool_calls=False)
    assert len(one["tool_calls"]) == 1
    assert one["finish_reason"] == "tool_calls"


def test_a_schema_for_answers_beside_tools(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Plan.model_json_schema()
    fields = {
        "messages": HELLO,
        "tools": [tool(Weather)],
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
        "max_tokens": 1000,
    }
    say(monkeypatch, "<tool_call>")
    assert both(server, **fields)["tool_calls"][0][0] == "Weather"
    say(monkeypatch, "{")
    answer = both(server, **fields)
    assert isinstance(Plan.model_validate_json(answer["content"]), Plan)
    assert answer["tool_calls"] == []


def test_llamas_calls(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = '{{ tools }} <|python_tag|> {"name": function name, "parameters": ...}'
    use_template(monkeypatch, server.tokenizer, template)
    fields = {"messages": HELLO, "tools": [tool(Weather)], "max_tokens": 300}
    answer = both(server, **fields, tool_choice="required", parallel_tool_calls=False)
    [(_, arguments)] = answer["tool_calls"]
    assert isinstance(Weather.model_validate_json(arguments), Weather)
    say(monkeypatch, "no { call")
    assert both(server, **fields)["content"].startswith("no { call")
    say(monkeypatch, '{"name": "other"')
    assert both(server, **fields)["tool_calls"][0][0] == "Weather"


@pytest.mark.parametrize(
    ("kwargs", "said", "reasoning"),
    [
        ({}, "<think>\nHm {} 7.\n</think>\n\n12", "Hm {} 7."),
        ({}, "12", ""),
        ({"open_thinking": True}, "Hm {} 7.\n</think>\n\n12", "Hm {} 7."),
        ({"enable_thinking": False}, "12", ""),
        ({"enable_thinking": False}, "<think>", ""),
    ],
)
def test_thoughts_come_before_the_form(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    kwargs: dict[str, Any],
    said: str,
    reasoning: str,
) -> None:
    use_template(monkeypatch, server.tokenizer, HERMES)
    say(monkeypatch, said)
    held = {"structured_outputs": {"regex": "[0-9]{2}"}}
    answer = both(server, messages=HELLO, chat_template_kwargs=kwargs, max_tokens=200, **held)
    assert answer["reasoning_content"] == reasoning
    assert re.fullmatch("[0-9]{2}", answer["content"])
    assert answer["finish_reason"] == "stop"


CONST = {"type": "json_schema", "json_schema": {"schema": {"const": "é"}}}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[a-f]{4}"}}, "[a-f]{4}"),
    ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
    ({"structured_outputs": {"grammar": 'root ::= "x"{3} | "y"'}}, "xxx|y"),
    ({"structured_outputs": {"json": {"const": 7}, "regex": None}}, "7"),
    ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
    ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*"),
    ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
    ({"response_format": CONST}, '"é"'),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=str)
def test_every_way_to_ask(server: LiveServer, form: dict[str, Any], pattern: str) -> None:
    shared = {"max_tokens": 100, "n": 3, "seed": 4, **form}
    chat = server.client.post(CHAT, json={"messages": HELLO, **shared}).json()["choices"]
    plain = server.client.post(COMPLETIONS, json={"prompt": ["a", "b"], **shared}).json()["choices"]
    texts = [c["message"]["content"] for c in chat] + [c["text"] for c in plain]
    assert len(texts) == 9
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_logprobs_are_numbers(server: LiveServer) -> None:
    body = {"structured_outputs": {"choice": ["ab"]}, "max_tokens": 9}
    chat = server.client.post(
        CHAT, json={"messages": HELLO, "logprobs": True, "top_logprobs": 5, **body}
    ).json()
    [first, _] = chat["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in first["top_logprobs"]] == ["a"]
    plain = server.client.post(COMPLETIONS, json={"prompt": "x", "logprobs": 3, **body}).json()
    assert plain["choices"][0]["logprobs"]["top_logprobs"] == [{"a": 0.0}, {"b": 0.0}]


# -- /v1/responses


def test_responses_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model=MODEL, input="Hello", text_format=Plan, max_output_tokens=1000
    )
    assert isinstance(answer.output_parsed, Plan)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


def flat(model: type[BaseModel]) -> Any:
    return {"type": "function", **tool(model)["function"]}


def test_responses_with_tools(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "input": "Hello",
        "tools": [flat(Weather)],
        "max_output_tokens": 500,
        "temperature": 0,
    }
    for choice in ("required", {"type": "function", "name": "Weather"}):
        answer = client.responses.create(**fields, tool_choice=choice, parallel_tool_calls=False)
        [call] = answer.output
        assert call.type == "function_call"
        assert (call.name, call.status) == ("Weather", "completed")
        assert isinstance(Weather.model_validate_json(call.arguments), Weather)
        assert answer.status == "completed"
        with client.responses.stream(
            **fields, tool_choice=choice, parallel_tool_calls=False
        ) as stream:
            kinds = [event.type for event in stream]
            [streamed] = stream.get_final_response().output
        assert [kind for kind, _ in groupby(kinds)] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert kinds.count("response.function_call_arguments.delta") > 5
        assert streamed.type == "function_call"
        assert streamed.arguments == call.arguments


def test_a_call_that_is_cut_off(server: LiveServer) -> None:
    body = {"input": "Hello", "tools": [flat(Weather)], "tool_choice": "required", "temperature": 0}
    whole = server.client.post("/v1/responses", json=body).json()["output"][0]["arguments"]
    for limit in (20, 62, 70):
        cut = server.client.post("/v1/responses", json={**body, "max_output_tokens": limit}).json()
        assert cut["status"] == "incomplete"
        [item] = cut["output"]
        assert item["status"] == "incomplete"
        if item["type"] == "function_call":
            assert whole.startswith(item["arguments"])
            assert len(item["arguments"]) < len(whole)
        else:
            assert item["content"][0]["text"].startswith("<tool_call>")


def test_a_response_of_text_and_calls(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    say(monkeypatch, f"<think>Hm.</think>Before {call}{call} after")
    body = {"input": "Hello", "tools": [{"type": "function", "name": "f"}], "temperature": 0}
    whole = server.client.post("/v1/responses", json=body).json()
    assert [item["type"] for item in whole["output"]] == [
        *("reasoning", "message", "function_call", "function_call", "message")
    ]
    assert whole["output"][2]["arguments"] == '{"a": 1}'
    assert whole["tools"][0]["name"] == "f"
    text = server.client.post("/v1/responses", json={**body, "stream": True}).text
    last = json.loads(text.split("data: ")[-1])["response"]
    names = re.compile(r"(msg|rs|fc|call|resp)_[0-9a-f]+")
    assert names.sub("", json.dumps(last["output"])) == names.sub("", json.dumps(whole["output"]))


def test_calls_and_results_go_back_into_a_conversation(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    use_template(monkeypatch, server.tokenizer, HERMES, prompts)
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "Wet."}],
        },
    ]
    body = {"input": items, "max_output_tokens": 1, "tools": [{"type": "function", "name": "f"}]}
    response = server.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert prompts[-1].count("<tool_call>{") == 2 + 1  # and in the instruction
    assert "<|im_start|>tool\nSunny.<|im_end|>" in prompts[-1]
    assert "<|im_start|>tool\nWet.<|im_end|>" in prompts[-1]


def test_the_operator_says_how_the_model_writes_calls() -> None:
    with pytest.raises(InvalidConfigError, match="--tool-call-parser must be auto, hermes or"):
        ServerOptions(tool_call_parser="xml")
    fields = {"messages": HELLO, "tools": [tool(Weather)], "tool_choice": "required"}
    with live_server(ServerOptions(tool_call_parser="llama3_json"), max_model_len=4096) as server:
        answer = both(server, **fields, max_tokens=300, return_token_ids=True)
        assert answer["tool_calls"][0][0] == "Weather"
        body = {"input": "Hello", "tools": [flat(Weather)], "tool_choice": "required"}
        items = server.client.post("/v1/responses", json=body).json()["output"]
        assert items[0]["name"] == "Weather"
        assert server.client.post("/tokenize", json=fields).status_code == 200
        plain = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert plain.status_code == 200


def test_a_form_of_calls_that_is_not_known(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, server.tokenizer, "{{ tools }} <function=name>")
    response = server.client.post(CHAT, json={"messages": HELLO, "tools": [STOP]})
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]
