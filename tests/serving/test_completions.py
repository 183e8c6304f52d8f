"""POST /v1/completions against a dry-run server."""

from typing import Any

import pytest

from tests.serving.live import COMPLETIONS, MODEL, LiveServer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def choices_of(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [item for event in events for item in event["choices"] if item["index"] == index]


def joined_logprobs(choices: list[dict[str, Any]]) -> dict[str, list[Any]]:
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]}


def test_an_answer_has_the_shape_of_openais(server: LiveServer) -> None:
    answer = server.complete(**GREEDY).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    [choice] = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert len(choice["text"].encode()) == 12
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_max_tokens_is_16_by_default(server: LiveServer, fields: dict[str, Any]) -> None:
    usage = server.complete(ignore_eos=True, **fields).json()["usage"]
    assert usage["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("Hello", 1),
        (["Hello", "World", "Hello"], 3),
        ([72, 101, 108], 1),
        ([[72, 101], [108, 108, 111]], 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 2])
def test_each_shape_of_prompt(server: LiveServer, prompt: Any, count: int, n: int) -> None:
    body = {**GREEDY, "prompt": prompt, "n": n, "seed": 3, "temperature": 1}
    answer = server.client.post(COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(count * n))
    assert answer["usage"]["completion_tokens"] == 12 * count * n
    events = server.stream(COMPLETIONS, **body)
    for choice in answer["choices"]:
        streamed = choices_of(events, choice["index"])
        assert "".join(item["text"] for item in streamed) == choice["text"]
        assert [item["finish_reason"] for item in streamed if item["finish_reason"]] == ["length"]


def test_a_batch_answers_as_its_prompts_do_alone(server: LiveServer) -> None:
    prompts = ["One prompt", "Another one", "A third"]
    together = server.complete(prompts, **GREEDY).json()
    alone = [server.complete(prompt, **GREEDY).json() for prompt in prompts]
    assert [choice["text"] for choice in together["choices"]] == [
        answer["choices"][0]["text"] for answer in alone
    ]
    assert together["usage"]["prompt_tokens"] == sum(
        answer["usage"]["prompt_tokens"] for answer in alone
    )


@pytest.mark.parametrize("prompt", ["Grüße", [72, 101, 108, 108, 111]], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_echo_puts_the_prompt_first(server: LiveServer, prompt: Any, n: int) -> None:
    text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
    body = {**GREEDY, "n": n, "prompt": prompt}
    plain = server.client.post(COMPLETIONS, json=body).json()["choices"]
    echoed = server.client.post(COMPLETIONS, json={**body, "echo": True}).json()["choices"]
    assert [choice["text"] for choice in echoed] == [text + choice["text"] for choice in plain]
    events = server.stream(COMPLETIONS, echo=True, **body)
    for choice in echoed:
        streamed = choices_of(events, choice["index"])
        assert "".join(item["text"] for item in streamed) == choice["text"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"n": 2, "return_token_ids": True}])
def test_an_echo_of_0_tokens_is_the_prompt_alone(
    server: LiveServer, fields: dict[str, Any]
) -> None:
    body = {"prompt": ["Hello", "Grüße"], "echo": True, "temperature": 0, "seed": 1, **fields}
    one = server.client.post(COMPLETIONS, json={**body, "max_tokens": 1}).json()
    answer = server.client.post(COMPLETIONS, json={**body, "max_tokens": 0}).json()
    num_prompt_tokens = one["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == num_prompt_tokens
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *events, last = server.stream(COMPLETIONS, **body, **usage, max_tokens=0)
    assert last["usage"]["completion_tokens"] == 0
    for choice, longer in zip(answer["choices"], one["choices"], strict=True):
        assert choice["text"] == ("Hello", "Grüße")[choice["index"] // fields.get("n", 1)]
        assert choice["finish_reason"] == "length"
        assert choice.get("token_ids", []) == []
        for name, values in (choice["logprobs"] or {}).items():
            assert values == longer["logprobs"][name][:-1]
        chunks = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert chunks[-1]["finish_reason"] == "length"
        if choice["logprobs"]:
            assert chunks[0]["logprobs"] == choice["logprobs"]


def test_logprobs_without_echo_start_at_0(server: LiveServer) -> None:
    [choice] = server.complete(logprobs=2, **GREEDY).json()["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(12))
    for token, logprob, tops in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert tops[token] == logprob
        assert len(tops) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("repeat", [1, 2])
def test_regression_15_text_offset_counts_the_echoed_prompt(
    server: LiveServer, stream: bool, repeat: int
) -> None:
    """The second time the prompt is in the prefix cache."""
    prompt = "An echoed prompt, longer than two blocks: Grüße"
    body = {**GREEDY, "prompt": prompt, "echo": True, "logprobs": 1}
    for _ in range(repeat):
        if stream:
            streamed = choices_of(server.stream(COMPLETIONS, **body))
            text = "".join(choice["text"] for choice in streamed)
            logprobs = joined_logprobs(streamed)
        else:
            [choice] = server.client.post(COMPLETIONS, json=body).json()["choices"]
            text, logprobs = choice["text"], choice["logprobs"]
    assert text.startswith(prompt)
    assert logprobs["text_offset"][-12:] == list(range(len(prompt), len(prompt) + 12))
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    whole = [
        (token, offset)
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
        if "�" not in token
    ]
    assert all(text[offset : offset + len(token)] == token for token, offset in whole)
    assert len(whole) == len(logprobs["tokens"]) - 4  # ü and ß are two tokens each


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_special_tokens_have_the_length_that_the_text_gives_them(
    server: LiveServer, stream: bool, echo: bool, skip: bool
) -> None:
    body: dict[str, Any] = {
        "prompt": [72, 256, 105, 105],
        "max_tokens": 4,
        "ignore_eos": True,
        "allowed_token_ids": [256, 258],
        "skip_special_tokens": skip,
        "logprobs": 0,
        "echo": echo,
    }
    if stream:
        streamed = choices_of(server.stream(COMPLETIONS, **body))
        text = "".join(choice["text"] for choice in streamed)
        logprobs = joined_logprobs(streamed)
    else:
        [choice] = server.client.post(COMPLETIONS, json=body).json()["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert len(tokens) == len(offsets) == (8 if echo else 4)
    if skip:
        assert text == ("Hii" if echo else "")
        assert offsets == ([0, 1, 1, 2, 3, 3, 3, 3] if echo else [0, 0, 0, 0])
    else:
        assert text == "".join(tokens)
        assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]


def test_prompt_logprobs(server: LiveServer) -> None:
    answer = server.complete("Hello", prompt_logprobs=0, **GREEDY).json()
    [choice] = answer["choices"]
    assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert choice["logprobs"] is None
    first, *rest = choices_of(
        server.stream(COMPLETIONS, prompt="Hello", prompt_logprobs=0, **GREEDY)
    )
    assert first["prompt_logprobs"] == choice["prompt_logprobs"]
    assert all("prompt_logprobs" not in item for item in rest)


def test_prompt_logprobs_come_also_with_an_empty_answer(server: LiveServer) -> None:
    whole = server.complete(**GREEDY).json()["choices"][0]["text"]
    body = {**GREEDY, "prompt": "Hello", "prompt_logprobs": 0, "stop": whole[:2]}
    first, last = choices_of(server.stream(COMPLETIONS, **body))
    assert len(first["prompt_logprobs"]) == 5
    assert (first["text"], last["finish_reason"]) == ("", "stop")


def test_echo_shows_as_many_candidates_as_logprobs_asks_for(server: LiveServer) -> None:
    fields = {**GREEDY, "echo": True, "logprobs": 3, "prompt_logprobs": 0}
    [choice] = server.complete("Hello", **fields).json()["choices"]
    assert all(len(tops) >= 3 for tops in choice["logprobs"]["top_logprobs"][1:])


def test_usage_of_a_streamed_batch(server: LiveServer) -> None:
    body = {**GREEDY, "prompt": ["One", "Two"], "stream_options": {"include_usage": True}}
    *_, last = server.stream(COMPLETIONS, **body)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 24)
    expected = server.complete(["One", "Two"], **GREEDY).json()["usage"]["prompt_tokens"]
    assert last["usage"]["prompt_tokens"] == expected


def test_best_of_equal_to_n_is_accepted(server: LiveServer) -> None:
    assert len(server.complete(n=2, best_of=2, **GREEDY).json()["choices"]) == 2


def test_a_stop_that_comes_at_once_gives_an_empty_text(server: LiveServer) -> None:
    whole = server.complete(**GREEDY).json()["choices"][0]["text"]
    [choice] = choices_of(server.stream(COMPLETIONS, prompt="Hello", stop=whole[:2], **GREEDY))
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
