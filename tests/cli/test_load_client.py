"""The load generator's client against servers that behave in their own ways."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from mini_infer.cli.load.client import Record, open_session, send
from mini_infer.cli.load.run import Job, Target, send_all
from mini_infer.cli.load.workload import tokens_per_word
from mini_infer.core.errors import MiniInferError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def stream(*parts: Any) -> Handler:
    """A server that answers with these events, each in a write of its own; text as it stands."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            text = part if isinstance(part, str) else f"data: {json.dumps(part)}\n\n"
            await response.write(text.encode())
        return response

    return handler


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Target]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Target(site.name, "chat", {})
    finally:
        await runner.cleanup()


async def ask(handler: Handler) -> Record:
    async with serving(handler) as target, open_session() as session:
        return await send(session, target.url, target.body(Job("Hi", 9)))


async def test_a_stream_as_openai_sends_it() -> None:
    pieces = [chunk(content=text) for text in ("a", "b", "c")]
    record = await ask(
        stream(chunk(role="assistant", content=""), *pieces, USAGE, "data: [DONE]\n\n")
    )
    assert (record.error, record.text) == (None, "abc")
    assert (record.num_prompt_tokens, record.num_output_tokens) == (7, 3)
    assert record.ttft is not None
    assert len(record.itls) == 2
    assert 0 < record.ttft <= record.ttft + sum(record.itls) <= record.latency
    assert record.tpot == pytest.approx((record.latency - record.ttft) / 2)


async def test_without_usage_pieces_are_counted() -> None:
    record = await ask(stream(chunk(content="a"), chunk(content="b"), "data: [DONE]\n\n"))
    assert (record.error, record.num_output_tokens, record.num_prompt_tokens) == (None, 2, 0)


async def test_reasoning_is_text_and_comments_are_none() -> None:
    parts = [": ping\n\n", chunk(reasoning_content="hm"), chunk(content="a"), "data: [DONE]\n\n"]
    record = await ask(stream(*parts))
    assert (record.error, record.text) == (None, "hma")


@pytest.mark.parametrize(("colon", "end"), [(": ", "\n"), (":", "\r\n")])
async def test_events_may_be_cut_anywhere(colon: str, end: str) -> None:
    data = (json.dumps(chunk(content="abc")), "[DONE]")
    text = "".join(f"data{colon}{item}{end}{end}" for item in data)
    record = await ask(stream(*text))
    assert (record.error, record.text) == (None, "abc")


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([chunk(content="a")], "without [DONE]"),
        ([{"error": {"message": "it broke"}}, "data: [DONE]\n\n"], "it broke"),
        (["data: {no json\n\n"], "none of OpenAI's"),
        ([{"choices": 3}], "none of OpenAI's"),
        ([{"no": "choices"}], "none of OpenAI's"),
    ],
)
async def test_what_goes_wrong_is_the_records_error(parts: list[Any], error: str) -> None:
    record = await ask(stream(*parts))
    assert record.error is not None
    assert error in record.error


@pytest.mark.parametrize(
    ("body", "error"),
    [('{"error": {"message": "too many"}}', "429: too many"), ("<html>", "429: <html>")],
)
async def test_a_refusal_says_why(body: str, error: str) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, text=body)

    assert (await ask(refuse)).error == error


async def test_a_hang_up_is_an_error_and_the_others_go_on() -> None:
    answers = iter([False, True, True])

    async def handler(request: web.Request) -> web.StreamResponse:
        if next(answers):
            return await stream(chunk(content="a"), "data: [DONE]\n\n")(request)
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with serving(handler) as target, open_session() as session:
        records = await send_all(session, target, [Job("Hi", 1)] * 3, max_concurrency=1)
    assert [record.error is None for record in records] == [False, True, True]


async def test_tokens_of_a_word_are_measured() -> None:
    async def count(request: web.Request) -> web.StreamResponse:
        words = (await request.json())["messages"][0]["content"].split()
        usage = {"prompt_tokens": 5 + 3 * len(words), "completion_tokens": 1}
        return await stream({"choices": [], "usage": usage}, "data: [DONE]\n\n")(request)

    async with open_session() as session:
        async with serving(count) as target:
            assert await tokens_per_word(session, target) == 3.0
        async with serving(stream("data: [DONE]\n\n")) as target:
            assert await tokens_per_word(session, target) == 1.0, "it tells no usage"
        async with serving(stream()) as target:
            with pytest.raises(MiniInferError, match="first request"):
                await tokens_per_word(session, target)
