"""The one model of a server: its card, and whether a request asks for it."""

from typing import Any

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidRequestError, ModelNotFoundError


def check_model(config: EngineConfig, name: str | None) -> None:
    """Raises ModelNotFoundError if ``name`` is not the served model's; None asks for any."""
    served = config.served_model_name
    if name is not None and name != served:
        raise ModelNotFoundError(
            f"the model {name!r:.200} does not exist; this server has {served!r}"
        )


def check_priority(config: EngineConfig, priority: int) -> None:
    """Raises InvalidRequestError for a priority that the scheduling policy would not look at."""
    if priority and config.scheduling_policy == "fcfs":
        raise InvalidRequestError(
            "priority has no effect on this server, which serves first come, first served: start "
            "it with --scheduling-policy priority, or leave it out",
            "priority",
        )


def model_card(config: EngineConfig, created: int) -> dict[str, Any]:
    """An entry of ``/v1/models``; ``created`` in seconds since 1970."""
    return {
        "id": config.served_model_name,
        "object": "model",
        "created": created,
        "owned_by": "mini-infer",
        "root": config.model,
        "parent": None,
        "max_model_len": config.max_model_len,
    }
