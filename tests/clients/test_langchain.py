"""LangChain's chat model and completion model."""

from typing import TYPE_CHECKING

import pytest

from tests.clients.conftest import MAX_TOKENS, PROMPT, QUESTION, Served

if TYPE_CHECKING:  # it takes seconds, on each worker that collects the tests
    from langchain_openai import ChatOpenAI


@pytest.fixture
def model(served: Served) -> "ChatOpenAI":
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=served.model,
        base_url=served.base_url,
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        max_retries=0,
        stream_usage=True,
    )


def test_invoke_and_stream(served: Served, model: "ChatOpenAI") -> None:
    from langchain_core.messages import AIMessageChunk

    answer = model.invoke(QUESTION)
    assert answer.content == served.answer
    assert answer.usage_metadata is not None
    whole: AIMessageChunk | None = None
    for chunk in model.stream(QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content == served.answer
    assert whole.usage_metadata is not None
    counts = ("input_tokens", "output_tokens", "total_tokens")
    for name in counts:
        assert whole.usage_metadata[name] == answer.usage_metadata[name]  # type: ignore[literal-required]


async def test_batches_and_asynchronous_calls(served: Served, model: "ChatOpenAI") -> None:
    assert [answer.content for answer in model.batch([QUESTION] * 3)] == [served.answer] * 3
    assert (await model.ainvoke(QUESTION)).content == served.answer
    pieces = [str(chunk.content) async for chunk in model.astream(QUESTION)]
    assert "".join(pieces) == served.answer


def test_a_chain_with_messages(served: Served, model: "ChatOpenAI") -> None:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.prompts import ChatPromptTemplate

    template = ChatPromptTemplate.from_messages(
        [SystemMessage("You are brief."), ("human", "{question}"), HumanMessage("Well?")]
    )
    chain = template | model.bind(stop=["zzzz"], logprobs=True, top_logprobs=1)
    answer = chain.invoke({"question": QUESTION})
    assert answer.content
    assert answer.response_metadata["logprobs"]["content"]
    assert answer.response_metadata["model_name"] == served.model


def test_the_responses_api(served: Served, model: "ChatOpenAI") -> None:
    answer = model.model_copy(update={"use_responses_api": True}).invoke(QUESTION)
    assert answer.text == served.answer


def test_completions(served: Served) -> None:
    from langchain_openai import OpenAI

    model = OpenAI(
        model=served.model, base_url=served.base_url, temperature=0, max_tokens=8, max_retries=0
    )
    answer = model.invoke(PROMPT)
    assert answer
    assert "".join(model.stream(PROMPT)) == answer
