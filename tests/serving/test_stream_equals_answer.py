"""However a text comes, a chat's chunks and a response's events add up to the whole answer."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.core.outputs import CompletionOutput, FinishReason, RequestDelta, RequestOutput
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.serving.answer import Envelope
from mini_infer.serving.chat import ChatChunks, chat_answer, chat_prompt
from mini_infer.serving.responses import ResponseAnswer, ResponseEvents
from mini_infer.serving.responses_schema import ResponsesRequest
from mini_infer.serving.schema import ChatCompletionRequest

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '{"name": "f", "arguments": {"x": [1, "é"]}}'
TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, " ", "\n", "a", "<", "é"]
    ),
    max_size=10,
).map("".join)
REASONS: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "length"])


def deltas_of(
    text: str, cuts: list[int], reason: FinishReason
) -> tuple[list[RequestDelta], RequestOutput]:
    """The deltas of a text that is cut there, and the output that they add up to."""
    tokenizer = ByteTokenizer()
    choice = CompletionOutput(0, text, tokenizer.encode(text), finish_reason=reason)
    output = RequestOutput("r", None, [1, 2], [choice])
    pieces = [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]
    deltas = [
        RequestDelta("r", 0, piece, tuple(tokenizer.encode(piece)), num_prompt_tokens=2)
        for piece in pieces
    ]
    deltas[-1].finish_reason, deltas[-1].output = reason, output
    return deltas, output


def data_of(events: str) -> list[dict[str, Any]]:
    lines = [line for line in events.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "token_ids": []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        whole["token_ids"] += choice.get("token_ids", ())
        for name in ("content", "reasoning_content"):
            whole[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                whole["calls"].append([function["name"], ""])
            whole["calls"][call["index"]][1] += function["arguments"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return {**whole, "finish_reason": reasons[-1]}


@pytest.mark.parametrize("tools", [None, TOOLS])
@given(text=TEXTS, reason=REASONS, data=st.data())
def test_chat(tools: Any, text: str, reason: FinishReason, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    deltas, output = deltas_of(text, cuts, reason)
    body = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], tools=tools, return_token_ids=True
    )
    chat_prompt(ByteTokenizer(), body)
    chunks = ChatChunks(Envelope("chatcmpl", "chunk", "m", False), body)
    events = "".join(event for delta in deltas for event in chunks(delta))
    [choice] = chat_answer(Envelope("chatcmpl", "answer", "m", False), body, output)["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert assembled(data_of(events)) == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [[function["name"], function["arguments"]] for function in calls],
        "token_ids": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
    }


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "output": [{**item, "id": ""} for item in response["output"]]}


@given(text=TEXTS, reason=REASONS, data=st.data())
def test_responses(text: str, reason: FinishReason, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    deltas, output = deltas_of(text, cuts, reason)
    body = ResponsesRequest(input="x")
    chat = body.chat_request()
    chat_prompt(ByteTokenizer(), chat)
    answer = ResponseAnswer(body, "m", chat.rendered)
    events = ResponseEvents(answer)
    told = data_of("".join(event for delta in deltas for event in events(delta)))
    whole = answer.whole(output)
    assert without_ids(told[-1]["response"]) == without_ids(whole)
    for index, item in enumerate(whole["output"]):
        pieces = [
            event["delta"]
            for event in told
            if event["type"].endswith(".delta") and event["output_index"] == index
        ]
        assert "".join(pieces) == item["content"][0]["text"]
