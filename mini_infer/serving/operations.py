"""Endpoints for whoever runs the server: probes, metrics, the prefix cache, profiles."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse, Response

from mini_infer import __version__
from mini_infer.runtime.async_engine import AsyncEngine
from mini_infer.serving.metrics import CONTENT_TYPE
from mini_infer.serving.server_metrics import ServerMetrics


def add_operations(
    app: FastAPI, engine: AsyncEngine, metrics: ServerMetrics, profile_folder: Path | None
) -> None:
    """Adds the routes; without a ``profile_folder`` those of profiles answer 404."""

    @app.get("/health")
    async def health() -> dict[str, Any]:
        engine.check_alive()
        return {"status": "ok", **_replicas(engine)}

    app.get("/ping")(health)  # what Amazon SageMaker asks

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> Response:  # in a thread: streams go on meanwhile
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        await engine.reset_prefix_cache()
        return {"status": "ok"}

    def enabled_folder() -> Path:
        if profile_folder is None:
            raise HTTPException(
                404, "profiling is off; start the server with --profile-folder to switch it on"
            )
        return profile_folder

    @app.post("/start_profile")
    async def start_profile() -> dict[str, Any]:
        enabled_folder()
        await engine.start_profile()
        return {"status": "recording"}

    @app.post("/stop_profile")
    async def stop_profile() -> dict[str, Any]:
        first, *others = await engine.stop_profile(enabled_folder())
        names = {"files": [first.name, *(path.name for path in others)]} if others else {}
        return {"status": "ok", "file": first.name, **names}


def _replicas(engine: AsyncEngine) -> dict[str, Any]:
    """How each of several engines is; nothing where there is one."""
    each = engine.replicas.replicas
    if len(each) == 1:
        return {}
    return {"replicas": [replica.death or "ok" for replica in each]}
