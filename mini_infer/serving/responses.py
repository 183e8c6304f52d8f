"""POST /v1/responses: an answer as a list of items, whole or as a stream of typed events.

::

    created, in_progress
      reasoning   output_item.added, content_part.added, reasoning_text.delta ... .done, item.done
      message     output_item.added, content_part.added, output_text.delta ... .done, item.done
      call        output_item.added, function_call_arguments.delta, .done, item.done
    completed | incomplete | failed

Nothing is kept: every request brings its whole conversation.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mini_infer.core.errors import InvalidRequestError, MiniInferError
from mini_infer.core.outputs import RequestDelta, RequestOutput
from mini_infer.runtime.async_engine import AsyncEngine, run_off_loop
from mini_infer.serving.answer import DeltaStream, collect
from mini_infer.serving.chat import chat_prompt, text_length
from mini_infer.serving.errors import raise_for_failure
from mini_infer.serving.messages import MessageParser, RenderedChat, call_id
from mini_infer.serving.reasoning import Reasoning, num_reasoning_tokens
from mini_infer.serving.responses_schema import ResponsesRequest
from mini_infer.serving.responses_tools import call_item, shown_tools
from mini_infer.serving.schema import RequestBody
from mini_infer.serving.spans import Spans
from mini_infer.serving.sse import EventStreamResponse, first_of, to_json, until_disconnect
from mini_infer.serving.tool_calls import ArgumentsPiece, ToolCall

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of output item: how its id begins, and its part's type, which events are named by."""

    name: str
    prefix: str
    part: str


MESSAGE = Kind("message", "msg", "output_text")
REASONING = Kind("reasoning", "rs", "reasoning_text")


def responses_router(
    engine: AsyncEngine,
    admit: Callable[[RequestBody], None],
    spans: Spans,
    tool_call_parser: str,
) -> APIRouter:
    """The route; ``admit`` raises for a request that the server does not take."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        admit(body)
        chat = body.chat_request()
        try:
            length = text_length(chat.messages)
            prompt = await run_off_loop(
                length, chat_prompt, engine.tokenizer, chat, tool_call_parser
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(
                str(error), "input" if error.param == "messages" else error.param
            ) from None
        answer = ResponseAnswer(body, engine.config.served_model_name, chat.rendered)
        spans.expect([answer.response_id], request.headers)
        stream = engine.stream(
            {answer.response_id: prompt},
            chat.sampling_params(),
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            add_special_tokens=bool(body.add_special_tokens),
            stream=bool(body.stream),
        )
        if body.stream:
            events = event_stream(stream, ResponseEvents(answer))
            first = await first_of(request.receive, events)
            return EventStreamResponse(_chained(first, events))
        outputs = await until_disconnect(request.receive, collect(stream))
        return JSONResponse(answer.whole(outputs[answer.response_id]))

    return router


class ResponseAnswer:
    """The response object of one request, as it is told of at every stage."""

    def __init__(self, body: ResponsesRequest, model: str, rendered: RenderedChat) -> None:
        self.response_id = f"resp_{uuid.uuid4().hex}"
        self.rendered = rendered
        self._fields: dict[str, Any] = {
            "id": self.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": shown_tools(body.tools),
            "top_logprobs": 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer of a request that isn't streamed."""
        [choice] = output.outputs
        events = ResponseEvents(self)
        for _ in events.read(choice.text, choice.finish_reason):
            pass
        return self.ended(output, events.items)

    def ended(self, output: RequestOutput, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The response object at its end."""
        return self.snapshot(
            _status(output.outputs[0].finish_reason), items, self._usage(output, items)
        )

    def snapshot(
        self,
        status: str,
        items: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        error: str | None = None,
    ) -> dict[str, Any]:
        """The response object at any time."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._fields,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": reason,
            "output": items,
            "usage": usage,
        }

    def _usage(self, output: RequestOutput, items: list[dict[str, Any]]) -> dict[str, Any]:
        token_ids = output.outputs[0].token_ids
        num_thoughts = 0
        if items[0]["type"] == REASONING.name:
            num_thoughts = num_reasoning_tokens(self.rendered.tokenizer, token_ids)
        num_input, num_output = len(output.prompt_token_ids), len(token_ids)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_thoughts},
            "total_tokens": num_input + num_output,
        }


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _item_id(kind: Kind) -> str:
    return f"{kind.prefix}_{uuid.uuid4().hex}"


def _part(kind: Kind, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind.part, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind is MESSAGE else part


def _item(kind: Kind, item_id: str, status: str, text: str | None) -> dict[str, Any]:
    """An output item; a text of None for one that has only begun."""
    content = [] if text is None else [_part(kind, text)]
    own: dict[str, Any] = {"role": "assistant"} if kind is MESSAGE else {"summary": []}
    return {"id": item_id, "type": kind.name, "status": status, "content": content, **own}


class ResponseEvents:
    """Formats the deltas of one request as the events of a streamed response."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._parser = MessageParser(answer.rendered.form)
        self.items: list[dict[str, Any]] = []
        """Those that are done."""
        self._kind: Kind | None = None
        """Of the item that is told of now, with its id and text so far."""
        self._call: dict[str, Any] | None = None
        """The item of a call that is told of now; there is no kind then."""
        self._item_id = ""
        self._texts: list[str] = []
        self._num_events = 0

    @property
    def started(self) -> bool:
        return self._num_events > 0

    def __call__(self, delta: RequestDelta) -> Iterator[str]:
        """The events that one delta becomes."""
        if not self.started:
            snapshot = self._answer.snapshot("in_progress", [])
            yield self._event("response.created", response=snapshot)
            yield self._event("response.in_progress", response=snapshot)
        yield from self.read(delta.text, delta.finish_reason)
        if delta.output is not None:
            response = self._answer.ended(delta.output, self.items)
            yield self._event(f"response.{_status(delta.finish_reason)}", response=response)

    def read(self, text: str, finish_reason: str | None) -> Iterator[str]:
        """The events of items that a piece of the answer's text becomes."""
        parts = self._parser.append(text)
        if finish_reason is not None:
            parts += self._parser.finish()
        for part in parts:
            if isinstance(part, ToolCall):
                yield from self._close("completed")
                yield from self._begin_call(part)
                if part.arguments:
                    yield from self._tell_arguments(ArgumentsPiece(part.arguments, last=True))
            elif isinstance(part, ArgumentsPiece):
                yield from self._tell_arguments(part)
            elif isinstance(part, Reasoning):
                yield from self._tell(REASONING, part.text)
            else:
                yield from self._tell(MESSAGE, part)
        if finish_reason is not None:
            if self._kind is None and self._call is None and not self.items:
                yield from self._begin(MESSAGE)
            yield from self._close(_status(finish_reason))

    def failed(self, message: str) -> str:
        """The last event of a response that failed on the way."""
        return self._event(
            "response.failed",
            response=self._answer.snapshot("failed", self.items, error=message),
        )

    def _tell(self, kind: Kind, text: str) -> Iterator[str]:
        if self._kind is not kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        self._texts.append(text)
        yield self._part_event(kind, "delta", delta=text)

    def _close(self, status: str) -> Iterator[str]:
        """Ends the item that is told of now, if there is one."""
        if self._kind is not None:
            yield from self._end(status)
        elif self._call is not None:
            yield from self._end_call(self._call, status)

    def _begin_call(self, call: ToolCall) -> Iterator[str]:
        self._item_id, self._texts = f"fc_{uuid.uuid4().hex}", []
        self._call = call_item(self._item_id, call_id(), call.name, "", "in_progress")
        index = len(self.items)
        yield self._event("response.output_item.added", output_index=index, item=self._call)

    def _tell_arguments(self, piece: ArgumentsPiece) -> Iterator[str]:
        assert self._call is not None, "a call comes before its arguments"
        self._texts.append(piece.text)
        if piece.text:
            yield self._call_event("delta", delta=piece.text)
        if piece.last:
            yield from self._end_call(self._call, "completed")

    def _end_call(self, begun: dict[str, Any], status: str) -> Iterator[str]:
        item = begun | {"arguments": "".join(self._texts), "status": status}
        yield self._call_event("done", name=item["name"], arguments=item["arguments"])
        index = len(self.items)
        self.items.append(item)
        self._call = None
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _call_event(self, suffix: str, **fields: Any) -> str:
        place = {"item_id": self._item_id, "output_index": len(self.items)}
        return self._event(f"response.function_call_arguments.{suffix}", **place, **fields)

    def _begin(self, kind: Kind) -> Iterator[str]:
        self._kind, self._item_id, self._texts = kind, _item_id(kind), []
        item = _item(kind, self._item_id, "in_progress", None)
        index = len(self.items)
        yield self._event("response.output_item.added", output_index=index, item=item)
        yield self._place_event("response.content_part.added", part=_part(kind, ""))

    def _end(self, status: str) -> Iterator[str]:
        assert self._kind is not None
        kind, text = self._kind, "".join(self._texts)
        yield self._part_event(kind, "done", text=text)
        yield self._place_event("response.content_part.done", part=_part(kind, text))
        item = _item(kind, self._item_id, status, text)
        index = len(self.items)
        self.items.append(item)
        self._kind = None
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _part_event(self, kind: Kind, suffix: str, **fields: Any) -> str:
        if kind is MESSAGE:
            fields["logprobs"] = []
        return self._place_event(f"response.{kind.part}.{suffix}", **fields)

    def _place_event(self, name: str, **fields: Any) -> str:
        place = {"item_id": self._item_id, "output_index": len(self.items), "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> str:
        data = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {name}\ndata: {to_json(data)}\n\n"


async def event_stream(stream: DeltaStream, events: ResponseEvents) -> AsyncGenerator[str, None]:
    """The events of a stream, one string for all deltas that were there.

    Raises:
        MiniInferError: it failed before its first event; later, an event tells of it.
    """
    async with contextlib.aclosing(stream):
        told: list[str] = []
        try:
            async for deltas in stream:
                for delta in deltas:
                    raise_for_failure(delta)
                    told += events(delta)
                ready, told = "".join(told), []
                yield ready
        except MiniInferError as error:
            if not events.started:
                raise
            yield "".join(told) + events.failed(str(error))
        except Exception:
            if not events.started:
                raise
            logger.exception("a stream failed")
            yield "".join(told) + events.failed("internal error")


async def _chained(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event
