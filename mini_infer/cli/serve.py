"""``mini-infer serve``: the OpenAI-compatible server."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from mini_infer.cli.options import given, with_engine_options

COLLECTOR_THRESHOLDS = (50_000, 20, 100)
"""Objects made and not freed before a collection of the young ones, then as ``gc`` has them."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Starting up makes a great many objects and next to no garbage: a tenth of the start-up time
    of the dry run went into looking for it. What was made is then frozen, so that no later
    collection, in the middle of a stream, walks through it again. A step of hundreds of streams
    makes thousands of objects that die with it: a collection for every few hundred, as Python has
    it, was a sixth of the server's time."""
    gc.disable()
    try:
        yield
        gc.freeze()
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
    finally:
        gc.enable()


class Size(click.ParamType[int]):
    """Bytes, also as 16MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from mini_infer.runtime.resolve import parse_size

        try:
            return value if isinstance(value, int) else parse_size(value)
        except (ValueError, OverflowError):
            raise click.BadParameter(f"{value!r} is no size such as 16MiB", ctx, param) from None


class Keys(click.ParamType[str]):
    """A text; the environment variable holds several, with commas between them."""

    name = "key"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value).strip()


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8000, type=click.IntRange(0, 65535), show_default=True, help="Port."
)
@click.option(
    "--api-key",
    "api_keys",
    type=Keys(),
    multiple=True,
    envvar="MINI_INFER_API_KEY",
    help="Key that clients must send; repeatable. Other users of this machine can read it here, "
    "so better put it into the environment: MINI_INFER_API_KEY=key[,key...]",
)
@click.option(
    "--allowed-origin",
    "allowed_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Web origin whose pages may use the API (CORS), such as https://example.com, or * for "
    "all; repeatable.",
)
@click.option(
    "--max-body-size",
    type=Size(),
    default="16MiB",
    show_default=True,
    help="Largest body of a request.",
)
@click.option(
    "--max-num-queued",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Choices that may wait for their first step; more are answered with 503.",
)
@click.option(
    "--request-timeout",
    type=float,
    metavar="SECONDS",
    help="Longest time that a request may take; it is aborted then. [default: none]",
)
@click.option(
    "--replicas",
    "--data-parallel-size",
    "num_replicas",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Engines behind this server, each on a GPU of its own, or on its share of the cores.",
)
@click.option(
    "--router",
    default="prefix_aware",
    show_default=True,
    metavar="NAME",
    help="Which replica gets a request: prefix_aware, least_loaded, round_robin, or your "
    "module:Class.",
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(["auto", "hermes", "llama3_json"]),
    default="auto",
    show_default=True,
    help="How the model writes calls of tools; auto: as its chat template tells it to.",
)
@click.option(
    "--profile-folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for profiles; switches /start_profile and /stop_profile on.",
)
@click.option("--access-log", is_flag=True, help="Write a line to standard error per request.")
@click.option(
    "--log-interval",
    type=float,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two lines on load, throughput and caches, while there is work; 0: none.",
)
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Collector that gets OpenTelemetry spans of requests (OTLP over HTTP), such as "
    "http://localhost:4318; needs mini-infer[otel].",
)
@with_engine_options
def serve(
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    allowed_origins: tuple[str, ...],
    max_body_size: int,
    max_num_queued: int,
    request_timeout: float | None,
    num_replicas: int,
    router: str,
    tool_call_parser: str,
    profile_folder: Path | None,
    access_log: bool,
    log_interval: float,
    otlp_endpoint: str | None,
    **options: Any,
) -> None:
    """Serve a model over HTTP: OpenAI's API under /v1, and a chat page at /."""
    with collector_paused():
        from mini_infer.serving.listener import bind
        from mini_infer.serving.options import ServerOptions

        server_options = ServerOptions(
            api_keys=api_keys,
            allowed_origins=allowed_origins,
            max_body_size=max_body_size,
            max_num_queued=max_num_queued,
            request_timeout=request_timeout,
            router=router,
            tool_call_parser=tool_call_parser,
            profile_folder=profile_folder,
            access_log=access_log,
            log_interval=log_interval,
            otlp_endpoint=otlp_endpoint,
        )
        # Loading a model may take minutes; that the port is taken is known at once.
        bind(host, port).close()
        from mini_infer.runtime.replica_starters import ReplicaStarters
    with ReplicaStarters(given(options), num_replicas) as starters:
        with collector_paused():
            starters.spawn()  # it comes up while this process imports its own half
            from mini_infer.serving.server import run_server
        run_server(starters, host, port, server_options)
