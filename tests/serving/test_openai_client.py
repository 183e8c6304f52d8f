"""The official client works against the server, with nothing special."""

from collections.abc import Iterator

import openai
import pytest

from tests.serving.live import MODEL, LiveServer

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=20
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20


def test_chat_stream_equals_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert answer.usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_n_stop_seed_and_logprobs(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            n=3,
            seed=4,
            stop=["."],
            logprobs=True,
            top_logprobs=2,
        )
        for _ in range(2)
    ]
    assert [c.message.content for c in answers[0].choices] == [
        c.message.content for c in answers[1].choices
    ]
    for choice in answers[0].choices:
        assert choice.finish_reason == "stop"
        assert "." not in (choice.message.content or "")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_vllms_extras_go_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=6,
        extra_body={"allowed_token_ids": [97], "ignore_eos": True, "top_k": 3},
    )
    assert answer.choices[0].message.content == "aaaaaa"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], echo=True, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[1].text.startswith("Two")
    stream = client.completions.create(model=MODEL, prompt="One", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=[{"type": "function", "function": {"name": ""}}],
        )


async def test_the_asynchronous_client(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content


async def test_closing_the_clients_stream_aborts(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(stream)
        await stream.close()
    server.wait_until_idle()
