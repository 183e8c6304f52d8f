"""Structured output and tool calls, as OpenAI's client and LangChain ask for them."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import QUESTION, Served

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    """No text of any length: the dry run's invented ones would not end."""

    name: Literal["Paris", "Rome"]
    continent: Literal["Europe", "Asia"]
    is_capital: bool


def describe(name: Literal["Paris", "Rome"], is_capital: bool) -> str:
    """Tell what is known of a city."""
    return f"{name} {is_capital}"


TOOL: Any = openai.pydantic_function_tool(City, name="describe", description="Tell of a city.")


def connect(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url, max_retries=0, timeout=180)


def greedy(served: Served) -> dict[str, Any]:
    return {"model": served.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 900}


def test_parse(served: Served) -> None:
    with connect(served) as client:
        answer = client.chat.completions.parse(response_format=City, **greedy(served))
        city = answer.choices[0].message.parsed
        assert isinstance(city, City)
        with client.chat.completions.stream(response_format=City, **greedy(served)) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
    assert final.choices[0].message.parsed == city
    assert {"content.delta", "content.done"} <= kinds


@pytest.mark.parametrize("choice", ["required", "named"])
def test_tools(served: Served, choice: str) -> None:
    if served.is_real:
        return  # its chat template knows no tools
    tool_choice: Any = choice
    if choice == "named":
        tool_choice = {"type": "function", "function": {"name": "describe"}}
    with connect(served) as client:
        options: Any = {"tools": [TOOL], "tool_choice": tool_choice, **greedy(served)}
        answer = client.chat.completions.create(**options)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        City.model_validate(json.loads(call.function.arguments))
        with client.chat.completions.stream(**options) as stream:
            arguments = "".join(
                event.arguments_delta
                for event in stream
                if event.type == "tool_calls.function.arguments.delta"
            )
            final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.arguments == arguments == call.function.arguments
    assert isinstance(streamed.function.parsed_arguments, City)


def test_an_impossible_schema_is_a_bad_request(served: Served) -> None:
    schema = {"name": "x", "schema": {"type": "no such type"}}
    response_format: Any = {"type": "json_schema", "json_schema": schema}
    with connect(served) as client, pytest.raises(openai.BadRequestError):
        client.chat.completions.create(response_format=response_format, **greedy(served))


def test_langchains_structured_output(served: Served) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model=served.model,
        base_url=served.base_url,
        temperature=0,
        max_completion_tokens=900,
        max_retries=0,
    )
    answer = model.with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert isinstance(answer, City)
    if not served.is_real:
        tools = model.bind_tools(
            [describe], tool_choice="any", strict=True, parallel_tool_calls=False
        )
        chosen = tools.invoke(QUESTION)
        (call,) = chosen.tool_calls
        assert call["name"] == "describe"
        assert set(call["args"]) == {"name", "is_capital"}
