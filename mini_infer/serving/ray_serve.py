"""Replicas on a Ray cluster, as many as the load takes: the server's application under Ray Serve.

    serve run mini_infer.serving.ray_serve:build model=smollm2-135m max_replicas=4

Serve's proxies take the requests and choose a replica for each; its controller adds replicas where
requests queue, and replaces one that is ill. So a replica has one engine, and does not start
another where that dies.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_type_hints

import msgspec
import ray
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_infer.core.engine_config import engine_options
from mini_infer.core.errors import InvalidConfigError
from mini_infer.runtime.async_engine import AsyncEngine
from mini_infer.runtime.engine_process import EngineStarter
from mini_infer.runtime.ray_cluster import ADDRESS, has_gpus
from mini_infer.runtime.resolve import load_tokenizer, parse_options
from mini_infer.serving.app import create_app
from mini_infer.serving.options import ServerOptions

HEALTH_CHECK_SECONDS = 2.0
REQUEST_ID = b"x-request-id"
API_KEYS = "MINI_INFER_API_KEY"
RAYS_OWN = {
    "router": "Ray Serve chooses a replica for each request",
    "replicas": "min_replicas and max_replicas say how many there are",
    "host": "Ray Serve listens, at http_options.host of its file",
    "port": "Ray Serve listens, at http_options.port of its file",
}
"""Options of ``mini-infer serve`` whose part Ray Serve plays here."""


@dataclass(frozen=True)
class ReplicaOptions:
    """How many replicas there are, and what each takes: names are Ray Serve's.

    Raises:
        InvalidConfigError: an option that can't work.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 32.0
    """Requests of a replica that are running or wait; above it, on average, replicas are added."""
    max_ongoing_requests: int = 1024
    """Requests that a replica is given; others wait in the proxies."""
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    num_cpus: float = 1.0
    """Cores of a replica, and threads of a model on a CPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise InvalidConfigError(
                f"min_replicas ({self.min_replicas}) must be between 0 and max_replicas "
                f"({self.max_replicas}), which is 1 or more"
            )
        if self.target_ongoing_requests <= 0 or self.max_ongoing_requests < 1:
            raise InvalidConfigError(
                "target_ongoing_requests must be above 0, and max_ongoing_requests 1 or more"
            )

    def autoscaling(self) -> dict[str, Any]:
        """Ray Serve's ``autoscaling_config``."""
        return {
            "min_replicas": self.min_replicas,
            "initial_replicas": self.min_replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_ongoing_requests,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
        }


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of ``args``: options of ``EngineConfig``, ``ServerOptions`` and
    ``ReplicaOptions`` by their names. Values may be texts, as a command line has them.

    Raises:
        InvalidConfigError: no such option, or a value that can't work.
    """
    given = {name.replace("-", "_"): value for name, value in args.items()}
    for name, reason in RAYS_OWN.items():
        if name in given:
            raise InvalidConfigError(f"there is no option {name!r} under Ray Serve: {reason}")
    replicas = ReplicaOptions(**_take(ReplicaOptions, given))
    server_options = _take(ServerOptions, given)
    if API_KEYS in os.environ:
        server_options.setdefault("api_keys", _texts(os.environ[API_KEYS]))
    server = ServerOptions(**server_options)
    options = {name: _engine_value(name, value) for name, value in given.items()}
    parse_options(options)
    deployment = serve.deployment(
        name="mini-infer",
        autoscaling_config=replicas.autoscaling(),
        max_ongoing_requests=replicas.max_ongoing_requests,
        ray_actor_options=_resources(options, replicas.num_cpus),
        health_check_period_s=HEALTH_CHECK_SECONDS,
    )(serve.ingress(_application)(EngineReplica))
    return deployment.bind(options, server)


class EngineReplica:
    """A replica's actor: an engine in a process beside it, and the application that serves it."""

    application: ClassVar[ASGIApp]
    """Of this process, which has one replica."""

    async def __init__(self, options: Mapping[str, Any], server: ServerOptions) -> None:  # type: ignore[misc]
        """Raises what loading an engine does: Ray Serve shows it, and tries again."""
        # An engine that is itself spread over the cluster has to find it.
        address = ray.get_runtime_context().gcs_address
        self._starter = EngineStarter(options, {ADDRESS: address})
        self._engine = await asyncio.to_thread(self._load, server)
        self._engine.start()
        EngineReplica.application = _without_request_id(create_app(self._engine, server))

    def check_health(self) -> None:
        """Raises EngineDeadError where the engine has died: Ray Serve then replaces the replica."""
        self._engine.check_alive()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()
        elif hasattr(self, "_starter"):
            self._starter.cancel()

    def _load(self, server: ServerOptions) -> AsyncEngine:
        tokenizer = load_tokenizer(self._starter.locate())
        return AsyncEngine(
            [self._starter.start()],
            tokenizer,
            max_num_queued=server.max_num_queued,
            request_timeout=server.request_timeout,
        )


def _application() -> ASGIApp:
    """What Ray Serve calls in a replica's process, once that is made."""
    return EngineReplica.application


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Serve's proxies give a request its id, and an answer that header; ``app`` would be second."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        def send_without_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message.get("headers", ()) if pair[0] != REQUEST_ID]
                message = {**message, "headers": headers}
            return send(message)

        await app(scope, receive, send_without_id)

    return call


def _resources(options: Mapping[str, Any], num_cpus: float) -> dict[str, float]:
    """What Ray keeps free for a replica: nothing for an engine that asks for places itself."""
    if options.get("distributed_executor_backend") == "ray":
        return {"num_cpus": 0}
    on_cpu = options.get("device") == "cpu" or options.get("dry_run")
    if on_cpu or not has_gpus():
        return {"num_cpus": num_cpus}
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    num_gpus = 1
    for name in sizes:
        num_gpus *= int(options.get(name, 1))
    return {"num_cpus": num_cpus, "num_gpus": num_gpus}


def _take(kind: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields of a dataclass out of ``given``."""
    kinds = get_type_hints(kind)
    taken = {}
    for field in fields(kind):
        if field.name in given:
            value = given.pop(field.name)
            if field.default is not MISSING and isinstance(field.default, tuple):
                value = _texts(value)
            try:
                taken[field.name] = msgspec.convert(
                    value, kinds[field.name], strict=False, dec_hook=_other_kind
                )
            except msgspec.ValidationError as error:
                raise InvalidConfigError(f"{field.name}={value!r:.80}: {error}") from None
    return taken


def _other_kind(kind: type[Any], value: Any) -> Any:
    """What texts can say besides what JSON has: a path."""
    return kind(value)


def _engine_value(name: str, value: Any) -> Any:
    option = engine_options().get(name)
    is_literal = option is not None and option["kind"] in (int, float, bool)
    return _literal(value) if is_literal and not name.endswith("_memory") else value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _literal(value: Any) -> Any:
    """A number or a truth value from its text; what is neither stays as it is."""
    try:
        return json.loads(value.lower()) if isinstance(value, str) else value
    except ValueError:
        return value
