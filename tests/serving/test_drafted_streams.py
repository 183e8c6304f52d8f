"""Several tokens a step (accepted drafts): streams add up to those of a token a step."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.core.outputs import RequestDelta
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.serving.answer import Envelope
from mini_infer.serving.chat import ChatChunks, chat_prompt
from mini_infer.serving.completions import CompletionFormat
from mini_infer.serving.schema import ChatCompletionRequest, CompletionRequest
from tests.runtime.output_bench import EOS, PROMPT, TOKENIZER, Bench
from tests.serving.live import COMPLETIONS, LiveServer, live_server

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=5)
STOPS = st.lists(st.sampled_from(["b\n", "\xe9", "aa", "</think>a"]), max_size=2)
CALL = '<tool_call>{"name": "f", "arguments": {"x": "\xe9"}}</tool_call>'
TEXTS = st.lists(st.sampled_from([CALL, "<think>", "</think>", "<|im_start|>", *"ab\n \xe9<"]))
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def deltas_of(text: str, sizes: list[int], stops: list[str], max_tokens: int) -> list[RequestDelta]:
    bench = Bench()
    bench.add(stop=stops, logprobs=1, max_tokens=max_tokens)
    bench.requests["r"].end_token_ids |= {EOS}
    bench.sample([*TOKENIZER.encode(text), EOS], sizes)
    return bench.deltas


def assembled(events: Iterable[str]) -> dict[str, Any]:
    """A stream's only choice, its texts and lists joined, and its usage in the end."""
    whole: dict[str, Any] = defaultdict(str)
    usage = None
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        [choice] = chunk["choices"]
        assert usage is None or chunk["usage"]["completion_tokens"] >= usage["completion_tokens"]
        usage = chunk["usage"]
        logprobs = choice.pop("logprobs") or {}
        calls = choice.get("delta", {}).pop("tool_calls", [])
        told = {**choice.pop("delta", {}), **choice}
        told |= {f"logprobs {name}": value for name, value in logprobs.items()}
        for call in calls:
            told[f"arguments {call['index']}"] = call["function"]["arguments"]
        for name, value in told.items():
            if isinstance(value, list):
                whole[name] = [*whole[name], *value]
            elif isinstance(value, str):
                whole[name] += value
    return {**whole, "usage": usage}


def completion_chunks() -> Callable[[RequestDelta], Iterable[str]]:
    body = CompletionRequest(
        prompt=PROMPT,
        stream=True,
        stream_options=USAGE,
        logprobs=1,
        echo=True,
        return_token_ids=True,
    )
    envelope = Envelope("cmpl", "text_completion", "m", include_usage=True)
    return CompletionFormat(envelope, body, ByteTokenizer(), {"r": PROMPT}).chunks


def chat_chunks() -> Callable[[RequestDelta], Iterable[str]]:
    body = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}],
        stream=True,
        stream_options=USAGE,
        logprobs=True,
        top_logprobs=1,
        tools=[{"type": "function", "function": {"name": "f"}}],
        return_token_ids=True,
    )
    chat_prompt(ByteTokenizer(), body)
    return ChatChunks(Envelope("chatcmpl", "chunk", "m", include_usage=True), body)


@given(TEXTS.map("".join), SIZES, STOPS, st.integers(1, 60))
def test_streams_of_drafts(text: str, sizes: list[int], stops: list[str], max_tokens: int) -> None:
    drafted = deltas_of(text, sizes, stops, max_tokens)
    plain = deltas_of(text, [1], stops, max_tokens)
    for make in (completion_chunks, chat_chunks):
        chunks, one_by_one = make(), make()
        told = assembled(event for delta in drafted for event in chunks(delta))
        expected = assembled(event for delta in plain for event in one_by_one(delta))
        assert told == expected
        output = drafted[-1].output
        assert output is not None
        token_ids = output.outputs[0].token_ids
        assert told["token_ids"] == token_ids
        assert told["usage"]["completion_tokens"] == len(token_ids)
        logprobs = "tokens" if make is completion_chunks else "content"
        assert len(told["logprobs " + logprobs]) >= len(token_ids)


SPECULATION = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}


@pytest.mark.parametrize("stop", [None, "st", ["e t", "."]])
def test_a_server_that_drafts_answers_as_one_that_does_not(stop: Any) -> None:
    fields = {"max_tokens": 60, "logprobs": 2, "n": 2, "seed": 3, "stop": stop}
    with live_server() as plain, live_server(speculative_config=SPECULATION) as drafting:

        def answers(server: LiveServer) -> list[Any]:
            whole = server.complete("So so", **fields).json()
            events = server.stream(COMPLETIONS, prompt="So so", stream_options=USAGE, **fields)
            streamed = [
                assembled(
                    f"data: {json.dumps(event)}"
                    for event in events
                    if event["choices"] and event["choices"][0]["index"] == index
                )
                for index in range(2)
            ]
            return [whole["choices"], whole["usage"], streamed, events[-1]["usage"]["total_tokens"]]

        assert answers(drafting) == answers(plain)
        drafting.wait_until_idle()
        text = drafting.client.get("/metrics").text
        [accepted] = [
            line
            for line in text.splitlines()
            if line.startswith("vllm:spec_decode_num_accepted_tokens_total")
        ]
        assert float(accepted.split()[-1]) > 0
        assert "spec_decode" not in plain.client.get("/metrics").text
