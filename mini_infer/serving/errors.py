"""OpenAI's error object, for everything that can go wrong with a request."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mini_infer.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    MiniInferError,
    ModelNotFoundError,
    PromptTooLongError,
    RequestTimeoutError,
    StepError,
    UnavailableError,
)
from mini_infer.core.outputs import RequestDelta
from mini_infer.core.structured_outputs import form_failure

TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}

CODES: dict[type[MiniInferError], str] = {
    ModelNotFoundError: "model_not_found",
    PromptTooLongError: "context_length_exceeded",
    RequestTimeoutError: "request_timeout",
    UnavailableError: "server_unavailable",
}
NEEDS_ANOTHER_MODEL = {
    "audio": "a speech model",
    "classify": "a classifier",
    "embeddings": "an embedding model",
    "images": "an image model",
    "moderations": "a moderation model",
    "pooling": "an embedding model",
    "realtime": "a speech model",
    "rerank": "a reranker",
    "score": "a reranker",
    "videos": "a video model",
}
"""Endpoints that clients know, by what follows ``/v1/``, and what they would take."""
NOT_OFFERED = {
    *("assistants", "batches", "containers", "conversations", "evals", "files", "fine_tuning"),
    *("threads", "uploads", "vector_stores"),
}
"""Others that a text model could be behind."""

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": f"{fault}; the error object says what to do.",
        "content": {"application/json": {"schema": _ERROR_SCHEMA}},
    }
    for status, fault in (("4XX", "The request is at fault"), ("5XX", "The server is"))
}
"""What every route may answer with, for the OpenAPI document."""


def raise_for_failure(delta: RequestDelta) -> None:
    """Raises an error if the server, not the request, is why the choice ended.

    What the step raised is for the log, which has it: it may name paths or other internals.

    Raises:
        InvalidRequestError: the form that it asked for became too complex on the way.
        StepError: a step raised while it held the request.
        MiniInferError: something other than the client aborted it.
    """
    if delta.finish_reason == "error":
        if (failure := form_failure(delta.stop_reason)) is not None:
            raise failure
        raise StepError("the model failed on this request; the server's log says why")
    if delta.finish_reason == "abort":
        raise MiniInferError("the request was aborted by the server")


def error_object(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error's answer, and of the last event of a stream that failed."""
    # A message may quote half a surrogate pair, which JSON can carry and UTF-8 can't.
    message = message.encode(errors="replace").decode()
    kind = TYPES.get(
        HTTPStatus(status), "server_error" if status >= 500 else "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_error_object(error: MiniInferError) -> dict[str, Any]:
    """The error object of a typed error."""
    message = str(error)
    param = "model" if isinstance(error, ModelNotFoundError) else None
    if isinstance(error, InvalidRequestError):
        param = error.param
    if isinstance(error, PromptTooLongError) and param == "prompt":
        # Agents cut their history and try again at these words, which their client may be all of.
        message = f"prompt is too long: {message}"
    return error_object(message, error.status, param, CODES.get(type(error)))


def install_error_handlers(app: FastAPI) -> None:
    """Makes every failure of ``app`` an OpenAI error object, without a traceback."""

    @app.exception_handler(MiniInferError)
    async def on_typed_error(request: Request, error: MiniInferError) -> JSONResponse:
        headers = {}
        if isinstance(error, UnavailableError | EngineDeadError):
            headers["retry-after"] = str(error.retry_after)
        return JSONResponse(to_error_object(error), error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        if error.body and not _is_json(request.headers.get("content-type", "")):
            message = "send a JSON object, with the header Content-Type: application/json"
            return JSONResponse(error_object(message, 415), 415)
        message, param = _explain(error.errors())
        return JSONResponse(error_object(message, HTTPStatus.BAD_REQUEST, param), 400)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            # FastAPI's own message is the status in words.
            reason = _why_missing(request.url.path) or message
            message = f"{request.method} {request.url.path}: {reason}"
        elif error.status_code == HTTPStatus.BAD_REQUEST:
            # FastAPI's only one, for whatever the parser raises that is no fault of the syntax.
            message = "the body can't be read: it must be UTF-8, and not nested hundreds deep"
        body = error_object(message, error.status_code)
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> JSONResponse:
        # The server's log has the traceback.
        return JSONResponse(error_object("internal error; see the server's log", 500), 500)


def _is_json(media_type: str) -> bool:
    kind = media_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _why_missing(path: str) -> str | None:
    """What to say of a path without a route that a client of OpenAI's API may well ask for."""
    name = path.removeprefix("/v1").strip("/").partition("/")[0]
    if name in NEEDS_ANOTHER_MODEL:
        return (
            f"this needs {NEEDS_ANOTHER_MODEL[name]}, and the model of this server generates text: "
            f"use /v1/chat/completions or /v1/completions"
        )
    if name in NOT_OFFERED:
        return "this server does not offer it: use /v1/chat/completions or /v1/completions"
    return None


def _explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One sentence and the field's name for pydantic's list of errors, which repeats a field once
    for every type of a union."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']}", None
    path = [str(part) for part in first["loc"][1:2]]
    if not path:
        return (
            "the body must be a JSON object, sent with the header Content-Type: application/json",
            None,
        )
    name = path[0]
    if first["type"] == "missing":
        return f"{name} is required", name
    reasons = dict.fromkeys(item["msg"] for item in errors if item["loc"][1:2] == (name,))
    return f"{name}: {', or: '.join(reasons)}", name
