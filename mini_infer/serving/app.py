"""The HTTP application: OpenAI's endpoints, the operator's, and the chat page."""

import time
from collections.abc import AsyncGenerator
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from mini_infer import __version__
from mini_infer.runtime.async_engine import AsyncEngine, Prompt, run_off_loop
from mini_infer.serving.answer import DeltaStream, Envelope, collect, events_of
from mini_infer.serving.chat import ChatChunks, chat_answer, chat_prompt, text_length
from mini_infer.serving.completions import CompletionFormat, without_output
from mini_infer.serving.errors import ERROR_RESPONSES, install_error_handlers
from mini_infer.serving.gate import CLIENT_CLOSED_REQUEST, gated
from mini_infer.serving.operations import add_operations
from mini_infer.serving.options import ServerOptions
from mini_infer.serving.responses import responses_router
from mini_infer.serving.schema import ChatCompletionRequest, CompletionRequest, RequestBody
from mini_infer.serving.served_model import check_model, check_priority, model_card
from mini_infer.serving.server_metrics import ServerMetrics
from mini_infer.serving.spans import open_spans
from mini_infer.serving.sse import EventStreamResponse, end_with_done, first_of, until_disconnect
from mini_infer.serving.tokenization import add_tokenization

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(
    engine: AsyncEngine,
    options: ServerOptions | None = None,
    metrics: ServerMetrics | None = None,
) -> ASGIApp:
    """The application that serves an engine, or its replicas. The caller shuts the engine down.

    ``metrics`` are those of /metrics, for a caller who reads them too.
    """
    options = options or ServerOptions()
    app = FastAPI(
        title="mini-infer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=ERROR_RESPONSES,
    )
    install_error_handlers(app)
    metrics = metrics or ServerMetrics(engine.config, len(engine.events.engines))
    metrics.subscribe(engine.events)
    spans = open_spans(options.otlp_endpoint, engine.events, engine.config.served_model_name)
    created = int(time.time())

    def admit(body: RequestBody) -> None:
        engine.check_open()
        check_model(engine.config, body.model)
        body.check()
        check_priority(engine.config, body.priority)

    def open_stream(prompts: dict[str, Prompt], body: Any, **options: Any) -> DeltaStream:
        return engine.stream(
            prompts,
            body.sampling_params(),
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            stream=bool(body.stream),
            **options,
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        admit(body)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        envelope = Envelope("chatcmpl", kind, engine.config.served_model_name, body.include_usage)
        length = text_length(body.messages)
        prompt = await run_off_loop(
            length, chat_prompt, engine.tokenizer, body, options.tool_call_parser
        )
        spans.expect([envelope.response_id], request.headers)
        # The template wrote the special tokens itself.
        add_special_tokens = bool(body.add_special_tokens)
        stream = open_stream(
            {envelope.response_id: prompt}, body, add_special_tokens=add_special_tokens
        )
        if body.stream:
            chunks = ChatChunks(envelope, body)
            return await stream_response(request, events_of(stream, chunks, envelope))
        outputs = await until_disconnect(request.receive, collect(stream))
        return JSONResponse(chat_answer(envelope, body, outputs[envelope.response_id]))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        admit(body)
        envelope = Envelope(
            "cmpl", "text_completion", engine.config.served_model_name, body.include_usage
        )
        prompts: dict[str, Prompt] = {
            f"{envelope.response_id}-{row}": prompt for row, prompt in enumerate(body.prompts())
        }
        spans.expect(prompts, request.headers)
        add_special_tokens = body.add_special_tokens is not False
        stream = open_stream(prompts, body, add_special_tokens=add_special_tokens)
        if body.only_echoes:
            stream = without_output(stream)
        formatter = CompletionFormat(envelope, body, engine.tokenizer, prompts)
        if body.stream:
            return await stream_response(request, events_of(stream, formatter.chunks, envelope))
        outputs = await until_disconnect(request.receive, collect(stream))
        return JSONResponse(formatter.answer(outputs))

    app.include_router(responses_router(engine, admit, spans, options.tool_call_parser))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card(engine.config, created)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        check_model(engine.config, model)
        return model_card(engine.config, created)

    add_tokenization(app, engine, options.tool_call_parser)
    add_operations(app, engine, metrics, options.profile_folder)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(_page(), headers={"content-security-policy": PAGE_POLICY})

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    return gated(app, options)


async def stream_response(request: Request, events: AsyncGenerator[str, None]) -> Response:
    """The answer that sends ``events``, once the first is there."""
    first = await first_of(request.receive, events)
    return EventStreamResponse(end_with_done(first, events))


@cache
def _page() -> str:
    return (Path(__file__).parent / "static" / "index.html").read_text(encoding="utf-8")
