"""``mini-infer serve``: the OpenAI-compatible server."""

import socket
from typing import Any

import click

from mini_infer.cli.options import given, with_engine_options
from mini_infer.core.errors import InvalidConfigError


def check_address(host: str, port: int) -> None:
    """Finds out before a model is loaded, which may take minutes, that the port is taken.

    Raises:
        InvalidConfigError: the address can't be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise InvalidConfigError(f"no such host to listen on: {host} ({error.strerror})") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise InvalidConfigError(
                f"can't listen on {host} port {port} ({error.strerror}); "
                f"choose another with --port, or stop what uses it"
            ) from None


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8000, type=click.IntRange(0, 65535), show_default=True, help="Port."
)
@with_engine_options
def serve(host: str, port: int, **options: Any) -> None:
    """Serve a model over HTTP: OpenAI's API under /v1, and a chat page at /."""
    check_address(host, port)
    from mini_infer.runtime.engine import LLMEngine
    from mini_infer.serving.server import run_server

    run_server(LLMEngine.from_options(**given(options)), host, port)
