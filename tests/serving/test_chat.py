"""POST /v1/chat/completions against a dry-run server."""

from typing import Any

import pytest

from tests.serving.live import CHAT, MODEL, LiveServer, live_server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello"}]


def contents(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_an_answer_has_the_shape_of_openais(server: LiveServer) -> None:
    answer = server.chat(**GREEDY).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"].encode()) == 24
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24


def test_without_max_tokens_the_answer_ends_by_itself(server: LiveServer) -> None:
    [choice] = server.chat(temperature=0).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].endswith(".")


def test_without_max_tokens_the_context_is_the_limit(server: LiveServer) -> None:
    answer = server.chat("x" * 4000, temperature=0, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == 4096
    assert answer["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_wins(server: LiveServer) -> None:
    answer = server.chat(max_tokens=9, max_completion_tokens=5, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 5


def test_a_stream_has_role_contents_and_one_finish(server: LiveServer) -> None:
    events = server.stream(CHAT, messages=HELLO, **GREEDY)
    deltas = [event["choices"][0] for event in events]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in item["delta"] for item in deltas[1:])
    assert [item["finish_reason"] for item in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1]["delta"], deltas[-1]["finish_reason"]) == ({}, "length")
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "seed": 7, "temperature": 1},
        {"stop": ["e "]},
        {"stop": " t", "include_stop_str_in_output": True},
        {"seed": 11, "temperature": 1, "max_tokens": 300, "ignore_eos": False},
    ],
    ids=str,
)
def test_the_joined_stream_is_the_answer(server: LiveServer, fields: dict[str, Any]) -> None:
    body = {**GREEDY, **fields}
    answer = server.chat(**body).json()
    events = server.stream(CHAT, messages=HELLO, **body)
    for choice in answer["choices"]:
        assert contents(events, choice["index"]) == choice["message"]["content"]
        finishes = [
            item["finish_reason"]
            for event in events
            for item in event["choices"]
            if item["index"] == choice["index"] and item["finish_reason"]
        ]
        assert finishes == [choice["finish_reason"]]


def test_usage_comes_last_when_asked_for(server: LiveServer) -> None:
    fields = {**GREEDY, "n": 2}
    expected = server.chat(**fields).json()["usage"]
    *events, last = server.stream(
        CHAT, messages=HELLO, stream_options={"include_usage": True}, **fields
    )
    assert all(event["choices"] and event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == expected["completion_tokens"] == 48
    assert last["usage"]["prompt_tokens"] == expected["prompt_tokens"]


def test_cached_tokens_are_reported(server: LiveServer) -> None:
    prompt = "This prompt is longer than a block of sixteen tokens."
    first, second = (server.chat(prompt, **GREEDY).json()["usage"] for _ in range(2))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached > first["prompt_tokens_details"]["cached_tokens"]
    assert cached % 16 == 0
    assert cached < second["prompt_tokens"]


def test_cache_salt_separates_tenants(server: LiveServer) -> None:
    prompt = "A prompt that two tenants share, word for word."
    usages = [
        server.chat(prompt, cache_salt=salt, **GREEDY).json()["usage"]["prompt_tokens_details"]
        for salt in ("first", "second", "first")
    ]
    assert [usage["cached_tokens"] > 0 for usage in usages] == [False, False, True]


@pytest.mark.parametrize("stream", [False, None])
def test_regression_17_stream_false_is_not_streamed(
    server: LiveServer, stream: bool | None
) -> None:
    response = server.chat(stream=stream, **GREEDY)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["object"] == "chat.completion"


def test_regression_17_n_is_honoured(server: LiveServer) -> None:
    choices = server.chat(n=4, max_tokens=12, ignore_eos=True, seed=1).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["message"]["content"] for choice in choices}) > 1


def test_regression_17_stop_is_honoured(server: LiveServer) -> None:
    whole = server.chat(**GREEDY).json()["choices"][0]["message"]["content"]
    stop = whole[5:9]
    [choice] = server.chat(stop=stop, **GREEDY).json()["choices"]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_seed_makes_answers_repeat(server: LiveServer) -> None:
    texts = [
        server.chat(seed=seed, temperature=1, max_tokens=16).json()["choices"][0]["message"]
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_earlier_turns_are_part_of_the_prompt(server: LiveServer) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    body = {"messages": turns, **GREEDY}
    whole = server.client.post(CHAT, json=body).json()
    last_only = server.client.post(CHAT, json={**body, "messages": turns[-1:]}).json()
    assert whole["usage"]["prompt_tokens"] > last_only["usage"]["prompt_tokens"]
    assert whole["choices"][0]["message"] != last_only["choices"][0]["message"]


def test_developer_is_another_name_of_system(server: LiveServer) -> None:
    answers = [
        server.client.post(
            CHAT, json={"messages": [{"role": role, "content": "Be brief."}, *HELLO], **GREEDY}
        ).json()["choices"]
        for role in ("developer", "system")
    ]
    assert answers[0] == answers[1]


def test_the_generation_prompt_can_be_left_out(server: LiveServer) -> None:
    sizes = [
        server.chat(add_generation_prompt=add, **GREEDY).json()["usage"]["prompt_tokens"]
        for add in (True, False)
    ]
    assert sizes[0] > sizes[1]


def test_template_variables_reach_the_template(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    apply = server.tokenizer.apply_chat_template

    def recording(messages: Any, **kwargs: Any) -> str:
        seen.update(kwargs)
        return apply(messages)

    monkeypatch.setattr(server.tokenizer, "apply_chat_template", recording)
    server.chat(chat_template_kwargs={"enable_thinking": False}, **GREEDY)
    assert seen == {"add_generation_prompt": True, "enable_thinking": False}


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs(server: LiveServer, num_top: int) -> None:
    fields = {**GREEDY, "logprobs": True, "top_logprobs": num_top}
    [choice] = server.chat(**fields).json()["choices"]
    content = choice["logprobs"]["content"]
    assert (
        b"".join(bytes(entry["bytes"]) for entry in content).decode()
        == (choice["message"]["content"])
    )
    assert all(len(entry["top_logprobs"]) == num_top for entry in content)
    assert all(entry["logprob"] <= 0 for entry in content)
    if num_top:
        for entry in content:
            tops = [top["logprob"] for top in entry["top_logprobs"]]
            assert tops == sorted(tops, reverse=True)
            assert entry["token"] == entry["top_logprobs"][0]["token"]
    streamed = [
        entry
        for event in server.stream(CHAT, messages=HELLO, **fields)
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_logprobs_come_also_while_text_is_held_back(server: LiveServer) -> None:
    whole = server.chat(**GREEDY).json()["choices"][0]["message"]["content"]
    fields = {**GREEDY, "logprobs": True, "stop": [whole[2:6] + "\0"]}
    events = server.stream(CHAT, messages=HELLO, **fields)
    entries = [event["choices"][0]["logprobs"] for event in events]
    assert sum(len(entry["content"]) for entry in entries if entry) == 24
    assert contents(events) == whole


def test_prompt_logprobs(server: LiveServer) -> None:
    answer = server.chat(prompt_logprobs=1, **GREEDY).json()
    positions = answer["prompt_logprobs"]
    assert len(positions) == answer["usage"]["prompt_tokens"]
    assert positions[0] is None
    assert {"logprob", "rank", "decoded_token"} == set(next(iter(positions[1].values())))
    assert "prompt_logprobs" not in server.chat(**GREEDY).json()
    events = server.stream(CHAT, messages=HELLO, prompt_logprobs=1, **GREEDY)
    choices = [choice for event in events for choice in event["choices"]]
    assert [item["prompt_logprobs"] for item in choices if "prompt_logprobs" in item] == [positions]


def test_priority_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server(scheduling_policy="priority") as server:
        seen: list[int] = []
        add = server.engine.add

        def recording(requests: Any) -> None:
            seen.append(requests[0].priority)
            add(requests)

        monkeypatch.setattr(server.engine, "add", recording)
        assert server.chat(priority=-3, **GREEDY).status_code == 200
        assert seen == [-3]


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"top_k": 5}, "top_k", 5),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"presence_penalty": 1}, "presence_penalty", 1),
        ({"frequency_penalty": -1}, "frequency_penalty", -1),
        ({"stop_token_ids": [7]}, "stop_token_ids", (7,)),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"bad_words": ["the"]}, "bad_words", ("the",)),
        ({"allowed_token_ids": [97, 98]}, "allowed_token_ids", (97, 98)),
        ({"logit_bias": {"97": 5}}, "logit_bias", {97: 5}),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"temperature": None}, "temperature", 1.0),
        ({"max_tokens": None}, "max_tokens", None),
        ({"stop": None}, "stop", ()),
    ],
    ids=str,
)
def test_sampling_fields_reach_the_engine(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    field: str,
    value: Any,
) -> None:
    seen: list[Any] = []
    add = server.engine.add

    def recording(requests: Any) -> None:
        seen.append(getattr(requests[0].params, field))
        add(requests)

    monkeypatch.setattr(server.engine, "add", recording)
    assert server.chat(**{"max_tokens": 4} | fields).status_code == 200
    assert seen == [value]
