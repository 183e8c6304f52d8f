"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shapes."""

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, ValidationError

from mini_infer.core.errors import InvalidRequestError
from mini_infer.runtime.async_engine import AsyncEngine, run_off_loop
from mini_infer.serving.chat import chat_prompt, text_length
from mini_infer.serving.schema import ChatCompletionRequest
from mini_infer.serving.served_model import check_model

if TYPE_CHECKING:
    from mini_infer.runtime.tokenizer import Tokenizer


class TokenizeRequest(BaseModel):
    """A text, or messages with the other fields of a chat request that shape its prompt."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """By default True for a prompt; a chat template writes its own."""
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: list[int]


def add_tokenization(app: FastAPI, engine: AsyncEngine, tool_call_parser: str) -> None:
    """Adds the routes."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        check_model(engine.config, body.model)
        length = text_length([body.prompt, body.messages])
        max_model_len = engine.config.max_model_len
        answer = await run_off_loop(
            length, _answer, engine.tokenizer, body, tool_call_parser, max_model_len
        )
        return Response(answer, media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check_model(engine.config, body.model)
        vocab_size = engine.config.model_config.vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:
            raise InvalidRequestError(
                f"tokens: ids of this model's vocabulary go from 0 to {vocab_size - 1}", "tokens"
            )
        decode = engine.tokenizer.decode
        text = await run_off_loop(len(body.tokens), decode, body.tokens, skip_special_tokens=False)
        return {"prompt": text}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What clients that have no tokenizer of their own ask for, such as lm-eval."""
        tokenizer, config = engine.tokenizer, engine.config

        def spelling(token_id: int | None) -> str | None:
            return None if token_id is None else tokenizer.token_bytes(token_id).decode()

        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": config.max_model_len,
            "bos_token": spelling(config.model_config.bos_token_id),
            "eos_token": spelling(tokenizer.eos_token_id),
            # The dry run has code in its place.
            "chat_template": None
            if config.dry_run
            else tokenizer.chat_template_source(with_tools=False) or None,
        }


def _answer(
    tokenizer: "Tokenizer", body: TokenizeRequest, tool_call_parser: str, max_model_len: int
) -> bytes:
    """The JSON of an answer: of a long text it, too, would keep an event loop for seconds."""
    token_ids = _encode(tokenizer, body, tool_call_parser)
    strings = None
    if body.return_token_strs:
        strings = [tokenizer.token_bytes(item).decode(errors="replace") for item in token_ids]
    return msgspec.json.encode(
        {
            "count": len(token_ids),
            "max_model_len": max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


def _encode(tokenizer: "Tokenizer", body: TokenizeRequest, tool_call_parser: str) -> list[int]:
    special = body.add_special_tokens
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, special is not False)
    prompt = chat_prompt(tokenizer, _as_chat(body), tool_call_parser)
    return tokenizer.encode(prompt, special is True)


def _as_chat(body: TokenizeRequest) -> ChatCompletionRequest:
    try:
        chat = ChatCompletionRequest.model_validate(
            {"messages": body.messages, **(body.model_extra or {})}
        )
    except ValidationError as error:
        raise RequestValidationError(
            [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        ) from None
    chat.check()
    return chat
