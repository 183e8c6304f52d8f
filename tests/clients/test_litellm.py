"""LiteLLM, by both of its providers that such a server can be."""

import importlib
from typing import Any

import pytest

from tests.clients.conftest import MAX_TOKENS, PROMPT, QUESTION, Served

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def litellm() -> Any:
    """Imported late: it takes seconds, on each worker that collects the tests."""
    return importlib.import_module("litellm")


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(served: Served, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{served.model}",
        "api_base": served.base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "num_retries": 0,
    }


def test_answer_and_stream(litellm: Any, served: Served, options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=MESSAGES, **options)
    assert answer.choices[0].message.content == served.answer
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == served.answer
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == served.answer
    assert whole.choices[0].finish_reason == answer.choices[0].finish_reason


async def test_the_asynchronous_calls(
    litellm: Any, served: Served, options: dict[str, Any]
) -> None:
    answer = await litellm.acompletion(messages=MESSAGES, **options)
    assert answer.choices[0].message.content == served.answer
    stream = await litellm.acompletion(messages=MESSAGES, stream=True, **options)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == served.answer


def test_extra_fields_and_text_completion(
    litellm: Any, served: Served, options: dict[str, Any]
) -> None:
    answer = litellm.completion(
        messages=MESSAGES, **options | {"max_tokens": 5}, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 5
    kind, _, model = options["model"].partition("/")
    kind = {"openai": "text-completion-openai"}.get(kind, kind)
    text = litellm.text_completion(prompt=PROMPT, **options | {"model": f"{kind}/{model}"})
    assert text.choices[0].text


def test_errors_are_its_own(litellm: Any, options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **options | {"temperature": -1})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "x y " * 9000}], **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **options | {"model": "openai/other"})
