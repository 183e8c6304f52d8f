"""Sends one request, streamed, and times what comes back.

Needs aiohttp (``mini-infer[bench]``), which is imported when a connection is opened: of the clients
for Python it takes the least from what it measures.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mini_infer.core.errors import InvalidConfigError

if TYPE_CHECKING:
    import aiohttp

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
LINE, DONE = b"data:", b"[DONE]"
MAX_ERROR = 200
"""Characters of an answer that is no error object."""


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds; ``start`` is on ``time.perf_counter``'s clock."""

    start: float
    ttft: float | None = None
    """From sending to the first piece of text."""
    itls: list[float] = field(default_factory=list)
    """Gaps between two pieces. A piece may hold several tokens, with speculation for example."""
    latency: float = 0.0
    """From sending to the end of the answer."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.ttft is None or self.num_output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.num_output_tokens - 1)


@asynccontextmanager
async def open_session(api_key: str | None = None) -> "AsyncIterator[aiohttp.ClientSession]":
    """A pool of connections without a limit of its own, in number or in time.

    Raises:
        InvalidConfigError: aiohttp is missing.
    """
    try:
        import aiohttp
    except ImportError:
        raise InvalidConfigError(
            "a load generator needs the package aiohttp: pip install 'mini-infer[bench]'"
        ) from None

    async with aiohttp.ClientSession(
        headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**18,
    ) as session:
        yield session


async def send(session: "aiohttp.ClientSession", url: str, body: Mapping[str, Any]) -> Record:
    """Sends a request whose ``body`` asks for a stream; what goes wrong is the record's error."""
    import aiohttp

    record = Record(start=time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                record.error = f"{response.status}: {_message(await response.text())}"
            else:
                await _read(response, record)
    except (aiohttp.ClientError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        record.error = f"an event that is none of OpenAI's: {type(error).__name__}: {error}"
    record.latency = time.perf_counter() - record.start
    return record


async def _read(response: "aiohttp.ClientResponse", record: Record) -> None:
    """Reads the events of a stream."""
    last = 0.0
    pieces: list[str] = []
    rest = b""
    complete = False
    async for data in response.content.iter_any():
        now = time.perf_counter()
        # Some servers end lines with a carriage return, or leave out the space after the colon.
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(LINE):  # an event's end, or a comment to keep a connection
                continue
            payload = line[len(LINE) :].strip()
            if payload == DONE:
                complete = True
                continue
            event = json.loads(payload)
            if "error" in event:
                record.error = _message(payload.decode())
                continue
            if usage := event.get("usage"):
                record.num_prompt_tokens = usage["prompt_tokens"]
                record.num_output_tokens = usage["completion_tokens"]
            for choice in event["choices"]:
                record.finish_reason = choice.get("finish_reason") or record.finish_reason
                if text := _text(choice):
                    pieces.append(text)
                    if record.ttft is None:
                        record.ttft = now - record.start
                    else:
                        record.itls.append(now - last)
                    last = now
    record.text = "".join(pieces)
    record.num_output_tokens = record.num_output_tokens or len(pieces)
    if not complete and record.error is None:
        record.error = "the stream ended without [DONE]"


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _message(answer: str) -> str:
    """What an error object says, or the beginning of what is none."""
    try:
        message = json.loads(answer)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer
    return str(message)[:MAX_ERROR]
