"""OpenAI's client for Python."""

import asyncio
from typing import Any

import openai
import pytest

from tests.clients.conftest import MAX_TOKENS, PROMPT, QUESTION, Served

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"temperature": 0, "max_tokens": MAX_TOKENS}


def connect(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url, max_retries=0, timeout=180)


def test_answer_stream_and_raw_response(served: Served) -> None:
    with connect(served) as client:
        create = client.chat.completions.create
        answer = create(model=served.model, messages=MESSAGES, **GREEDY)
        assert answer.choices[0].message.content == served.answer
        stream = create(model=served.model, messages=MESSAGES, stream=True, **GREEDY)
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == served.answer
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
        raw = client.chat.completions.with_raw_response.create(
            model=served.model, messages=MESSAGES, **GREEDY
        )
        assert raw.headers["x-request-id"]
        assert raw.parse().choices[0].message.content == served.answer


def test_the_stream_helper(served: Served) -> None:
    with (
        connect(served) as client,
        client.chat.completions.stream(
            model=served.model,
            messages=MESSAGES,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
            **GREEDY,
        ) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)
    assert final.choices[0].message.content == served.answer
    assert final.usage is not None
    logprobs = final.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or ()) == final.usage.completion_tokens


async def test_the_asynchronous_client_in_parallel(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model=served.model, messages=MESSAGES, **GREEDY)
                for _ in range(4)
            )
        )
    assert [answer.choices[0].message.content for answer in answers] == [served.answer] * 4


def test_completions_with_echo_and_logprobs(served: Served) -> None:
    with connect(served) as client:
        answer = client.completions.create(
            model=served.model, prompt=PROMPT, echo=True, logprobs=1, temperature=0, max_tokens=4
        )
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens or ()) == choice.text


def test_responses(served: Served) -> None:
    with connect(served) as client:
        answer = client.responses.create(
            model=served.model, input=QUESTION, temperature=0, max_output_tokens=MAX_TOKENS
        )
        with client.responses.stream(
            model=served.model, input=QUESTION, temperature=0, max_output_tokens=MAX_TOKENS
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
    assert answer.output_text == final.output_text == served.answer
    assert {"response.created", "response.output_text.delta", "response.output_text.done"} <= kinds


def test_errors(served: Served) -> None:
    with connect(served) as client:
        create: Any = client.chat.completions.create
        request = {"model": served.model, "messages": MESSAGES}
        with pytest.raises(openai.NotFoundError, match="other"):
            create(**request | {"model": "other"})
        with pytest.raises(openai.BadRequestError, match="temperature") as bad:
            create(**request, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="lower max_tokens") as long:
            create(**request, max_tokens=10**6)
        assert long.value.code == "context_length_exceeded"
