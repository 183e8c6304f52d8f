"""A dry-run server in this process, its engine too, and helpers to read its answers."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from mini_infer.runtime.async_engine import AsyncEngine
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.tokenizer import Tokenizer
from mini_infer.serving.app import create_app
from mini_infer.serving.listener import bind
from mini_infer.serving.options import ServerOptions
from tests.runtime.engine_host import threaded

MODEL = "dry-model"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATIENCE = 30.0
"""Seconds that a busy machine may take for what takes milliseconds."""


@dataclass
class LiveServer:
    url: str
    engine: EngineCore
    tokenizer: Tokenizer
    async_engine: AsyncEngine
    client: httpx.Client

    def chat(self, content: str = "Hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.client.post(CHAT, json=body)

    def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return self.client.post(COMPLETIONS, json={"prompt": prompt, **fields})

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer, which must end with [DONE]."""
        response = self.client.post(path, json={"stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def wait_until_idle(self) -> None:
        wait_for(lambda: not self.engine.has_unfinished())
        assert self.engine.scheduler.cache.num_used_blocks == 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


@contextlib.contextmanager
def live_server(
    server_options: ServerOptions | None = None, **options: Any
) -> Iterator[LiveServer]:
    server_options = server_options or ServerOptions()
    engine = LLMEngine.from_options(dry_run=True, served_model_name=MODEL, **options)
    async_engine = threaded(
        engine,
        max_num_queued=server_options.max_num_queued,
        request_timeout=server_options.request_timeout,
    )
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = create_app(async_engine, server_options)
    config = uvicorn.Config(app, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        yield LiveServer(url, engine.core, engine.tokenizer, async_engine, client)
    server.should_exit = True
    thread.join(PATIENCE)
    async_engine.shutdown()
    assert not thread.is_alive()
