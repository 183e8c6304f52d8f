"""``mini-infer serve``: the OpenAI-compatible server."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from mini_infer.cli.options import given, with_engine_options


@contextmanager
def collector_paused() -> Iterator[None]:
    """Starting up makes a great many objects and next to no garbage: a tenth of the start-up time
    of the dry run went into looking for it. What was made is then frozen, so that no later
    collection, in the middle of a stream, walks through it again."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8000, type=click.IntRange(0, 65535), show_default=True, help="Port."
)
@with_engine_options
def serve(host: str, port: int, **options: Any) -> None:
    """Serve a model over HTTP: OpenAI's API under /v1, and a chat page at /."""
    with collector_paused():
        from mini_infer.runtime.engine import LLMEngine
        from mini_infer.serving.server import bind, run_server

        # Loading a model may take minutes; that the port is taken is known at once.
        bind(host, port).close()
        engine = LLMEngine.from_options(**given(options))
    run_server(engine, host, port)
