"""Bad input gets OpenAI's error object with the right status, and the server goes on."""

import json
from typing import Any

import pytest

from tests.serving.live import CHAT, COMPLETIONS, LiveServer

HELLO = [{"role": "user", "content": "Hello"}]
DEEP = '{"items":' * 400 + "{}" + "}" * 400
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}

SHARED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "0 or more"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_p": 1.5}, "top_p", "(0, 1]"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"top_k": -5}, "top_k", "off"),
    ({"n": 0}, "n", "between 1 and"),
    ({"n": 1.5}, "n", "integer"),
    ({"max_tokens": 0}, "max_tokens", "1 or more"),
    ({"max_tokens": -3}, "max_tokens", "1 or more"),
    ({"max_tokens": 5000}, "max_tokens", "5000"),
    ({"min_tokens": -1}, "min_tokens", "0 or more"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": [1]}, "stop", "string"),
    ({"seed": 2**70}, "seed", "64-bit"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    *(
        ({"logit_bias": {key: 1}}, "logit_bias", "token ids")
        for key in ("a", "", "1_0", " 1 ", "01", "00", "+1", "-1", "1.0", "\u0661")
    ),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "longer"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "'01'"),
    ({"logit_bias": {"1": 1000}}, "logit_bias", "[-100, 100]"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "vocabulary"),
    ({"stop_token_ids": [99999999]}, "stop_token_ids", "vocabulary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "token id"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "continuous_usage_stats",
        "include_usage",
    ),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ({"priority": "high"}, "priority", "integer"),
    ({"priority": 1}, "priority", "first come, first served"),
    ({"cache_salt": 5}, "cache_salt", "string"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"response_format": {"type": "xml"}}, "response_format", "one of text, json_object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "response_format.json_schema.schema must be a JSON schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
        "response_format",
        "response_format.json_schema.schema: Invalid type: strin",
    ),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs", "choice[0] must be"),
    ({"structured_outputs": {"lark": "a"}}, "structured_outputs", "lark is not known"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "either structured_outputs or response_format",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]},
        "allowed_token_ids",
        "give one of them",
    ),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more, or -1"),
    ({"truncate_prompt_tokens": "all"}, "truncate_prompt_tokens", "integer"),
    ({"return_token_ids": 1}, "return_token_ids", "boolean"),
    ({"spaces_between_special_tokens": "no"}, "spaces_between_special_tokens", "boolean"),
    ({"guided_json": {}}, "guided_json", "use structured_outputs"),
    ({"store": True}, "store", "not supported"),
    ({"service_tier": "flex"}, "service_tier", "not supported"),
    ({"service_tier": "priority"}, "service_tier", "not supported"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "not supported"),
    ({"prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options", "not supported"),
    ({"moderation": {"model": "x"}}, "moderation", "not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"verbosity": "low"}, "verbosity", "not supported"),
    ({"web_search_options": {}}, "web_search_options", "not supported"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "not supported"),
    ({"functions": [{"name": "x"}]}, "functions", "not supported"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "include_obfuscation",
        "not supported",
    ),
]
CHAT_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "Hello"}, "messages", "list"),
    ({"messages": [{"content": "Hello"}]}, "messages", "role"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages", "'critic'"),
    ({"messages": [{"role": "tool", "tool_call_id": 5}]}, "messages", "tool_call_id"),
    ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages", "role user"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0] must be"),
    ({"tools": [{"type": "web_search"}]}, "tools", "other types"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "name"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": 5}}]}, "tools", "a schema"),
    ({"tools": [{**TOOL, "function": {"name": "f", "strict": 1}}]}, "tools", "strict"),
    (
        {
            "tools": [TOOL, {**TOOL, "function": {"name": "g", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
        'tools[1].function.parameters: Unimplemented keys: ["not"]',
    ),
    ({"tools": [TOOL] * 129}, "tools", "at most 128"),
    (
        {"tools": [{**TOOL, "function": {"name": "f", "parameters": json.loads(DEEP)}}]},
        "tools",
        "more than 100 levels",
    ),
    ({"tool_choice": "required"}, "tools", "there are no tools"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "names 'x', which is none of the tools",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "must be 'none'"),
    ({"tool_choice": "always"}, "tool_choice", "must be 'none', 'auto', 'required'"),
    (
        {"tools": [TOOL], "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "tools go together with a JSON schema",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "both",
    ),
    (
        {
            "continue_final_message": True,
            "messages": [{"role": "assistant", "tool_calls": [CALL], "content": "x"}],
        },
        "continue_final_message",
        "tool_calls can't be continued",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "prompt", "characters, more than"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages", "list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "image_url",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages", "tool"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "1 or more"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"logprobs": 5}, "logprobs", "boolean"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"echo": True}, "echo", "only supported by /v1/completions"),
    ({"best_of": 2}, "best_of", "only supported by /v1/completions"),
    ({"prompt": "Hello"}, "prompt", "only supported by /v1/completions"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
]
COMPLETIONS_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": None}, "prompt", "string"),
    ({"prompt": ["Hello", 5]}, "prompt", "list of strings"),
    ({"prompt": [True]}, "prompt", "list of strings"),
    ({"prompt": [99999999]}, "prompt", "vocabulary"),
    ({"prompt": [-1]}, "prompt", "vocabulary"),
    ({"prompt": "x" * 5000}, "prompt", "4096"),
    ({"prompt": ["x"] * 4097}, "prompt", "4096 choices"),
    ({"prompt": [[1]] * 33, "n": 128}, "prompt", "4096 choices"),
    ({"best_of": 3}, "best_of", "equals n"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"tools": [TOOL]}, "tools", "only supported by /v1/chat/completions"),
    ({"tool_choice": "auto"}, "tool_choice", "only supported by /v1/chat/completions"),
    ({"continue_final_message": True}, "continue_final_message", "only supported by"),
    ({"echo": True, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "leave out one"),
    ({"messages": HELLO}, "messages", "only supported by /v1/chat/completions"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "only supported by"),
    ({"top_logprobs": 0}, "top_logprobs", "only supported by"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"logprobs": True}, "logprobs", "integer"),
]
TABLE = [
    *((CHAT, {"messages": HELLO} | fields, param, text) for fields, param, text in SHARED),
    *((CHAT, {"messages": HELLO} | fields, param, text) for fields, param, text in CHAT_ONLY),
    *((COMPLETIONS, {"prompt": "Hello"} | fields, param, text) for fields, param, text in SHARED),
    *(
        (COMPLETIONS, {"prompt": "Hello"} | fields, param, text)
        for fields, param, text in COMPLETIONS_ONLY
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "text"), TABLE)
def test_bad_input_is_refused_with_its_field(
    server: LiveServer, path: str, body: dict[str, Any], param: str, text: str, stream: bool
) -> None:
    if stream and "stream" not in body and "stream_options" not in body:
        body = {**body, "stream": True}
    response = server.client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert text in error["message"]
    assert "Traceback" not in response.text


@pytest.mark.parametrize("depth", [300, 490, 900, 930])
@pytest.mark.parametrize("field", ["x", "content"])
def test_a_deeply_nested_message_is_no_fault(server: LiveServer, depth: int, field: str) -> None:
    """Whether it is too deep for the parser, or only for the content's form, or does not matter."""
    deep = "[" * depth + "]" * depth
    body = f'{{"messages": [{{"role": "user", "{field}": {deep}}}], "max_tokens": 1}}'
    response = server.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == (200 if field == "x" else 400), response.text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not valid JSON"),
        (b"", "JSON object"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, "nested"),
        (b'{"messages": "\xff"}', "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', "finite"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "cache_salt": "\\ud800"}', "salt"),
        (b'{"messages": [{"role": "\\ud800", "content": "hi"}]}', "role"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "n": 1e400}', "n"),
    ],
    ids=lambda value: repr(value[:60]),
)
def test_malformed_bodies(server: LiveServer, content: bytes, text: str) -> None:
    response = server.client.post(
        CHAT, content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert text in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "media_type",
    [
        "application/x-www-form-urlencoded",
        "text/plain",
        "multipart/form-data; boundary=x",
        "",
        None,
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_a_body_that_is_not_declared_json(
    server: LiveServer, path: str, media_type: str | None
) -> None:
    """A web page of another origin can send these without asking, which is one more reason."""
    headers = {} if media_type is None else {"content-type": media_type}
    response = server.client.post(path, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 415
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "media_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_spellings_of_json(server: LiveServer, media_type: str) -> None:
    response = server.client.post(
        COMPLETIONS,
        content=b'{"prompt": "x", "max_tokens": 1}',
        headers={"content-type": media_type},
    )
    assert response.status_code == 200


@pytest.mark.parametrize("media_type", ["text/plain", "application/json"])
def test_no_body(server: LiveServer, media_type: str) -> None:
    response = server.client.post(CHAT, headers={"content-type": media_type})
    assert response.status_code == 400
    assert "JSON object" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [(CHAT, {}, "messages"), (COMPLETIONS, {}, "prompt")],
)
def test_a_missing_field_is_named(
    server: LiveServer, path: str, body: dict[str, Any], field: str
) -> None:
    response = server.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"{field} is required"
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"some_new_field": 1},
        {"user": "someone", "safety_identifier": "someone", "prompt_cache_key": "x"},
        {"metadata": {"a": "b"}},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"store": False},
        {"store": None},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"prompt_cache_retention": "in_memory"},
        {"reasoning_effort": "none"},
        {"verbosity": "medium"},
        {"echo": False},
        {"logprobs": False, "top_logprobs": 0},
        {"continue_final_message": False},
        {"return_token_ids": False},
        {"include_reasoning": False},
        {"spaces_between_special_tokens": True},
        {"spaces_between_special_tokens": False},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_accepted(server: LiveServer, fields: dict[str, Any]) -> None:
    assert server.chat(max_tokens=2, **fields).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_another_model_is_not_found(server: LiveServer, path: str) -> None:
    body = {"messages": HELLO, "prompt": "Hello", "model": "gpt-4o"}
    response = server.client.post(path, json=body)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-4o" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/another/model", 404),
        ("DELETE", "/health", 405),
    ],
)
def test_wrong_routes(server: LiveServer, method: str, path: str, status: int) -> None:
    response = server.client.request(method, path)
    assert response.status_code == status
    assert ("allow" in response.headers) == (status == 405)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_message_says_both_lengths(server: LiveServer) -> None:
    message = server.complete("x" * 5000).json()["error"]["message"]
    assert "5000" in message
    assert "4096" in message


def test_the_server_goes_on_after_all_that(server: LiveServer) -> None:
    assert server.chat(max_tokens=2).status_code == 200
    server.wait_until_idle()
