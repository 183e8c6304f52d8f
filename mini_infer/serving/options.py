"""What the HTTP server, as opposed to the engine, can be told."""

import math
from dataclasses import dataclass
from pathlib import Path

from mini_infer.core.errors import InvalidConfigError
from mini_infer.runtime.waiting_room import MAX_NUM_QUEUED
from mini_infer.serving.spans import check_endpoint
from mini_infer.serving.tool_calls import TOOL_PARSERS

MAX_BODY_SIZE = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Checked when it is made.

    Raises:
        InvalidConfigError: an option that can't work.
    """

    api_keys: tuple[str, ...] = ()
    """One of them has to come with every request; none: everybody is served."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may read answers (CORS)."""
    max_body_size: int = MAX_BODY_SIZE
    """Bytes."""
    max_num_queued: int = MAX_NUM_QUEUED
    """Choices that may wait for their first step."""
    request_timeout: float | None = None
    """Seconds that a request may take."""
    router: str = "prefix_aware"
    """Which replica gets a request, where there are several: a name of ``load_router``."""
    tool_call_parser: str = "auto"
    """How models write calls: a name of ``TOOL_PARSERS``, or auto, as the chat template says."""
    profile_folder: Path | None = None
    """Where profiles go, which switches their endpoints on."""
    access_log: bool = False
    log_interval: float = 5.0
    """Seconds between two lines on load and throughput; 0: none."""
    otlp_endpoint: str | None = None
    """Collector that gets a span per request, and one per phase of it."""

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isprintable() or " " in key:
                raise InvalidConfigError(
                    "--api-key: a key has one character or more, and no space within"
                )
        for origin in self.allowed_origins:
            scheme, _, host = origin.partition("://")
            if origin != "*" and not (scheme and host and "/" not in host):
                raise InvalidConfigError(
                    f"--allowed-origin must be like https://example.com, without a path, or *; "
                    f"got {origin!r:.80}"
                )
        if self.tool_call_parser not in ("auto", *TOOL_PARSERS):
            raise InvalidConfigError(
                f"--tool-call-parser must be auto, {' or '.join(TOOL_PARSERS)}, got "
                f"{self.tool_call_parser!r:.80}"
            )
        if self.max_body_size < 1:
            raise InvalidConfigError("--max-body-size must be 1 byte or more")
        if self.max_num_queued < 1:
            raise InvalidConfigError("--max-num-queued must be 1 or more")
        timeout = self.request_timeout
        if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
            raise InvalidConfigError("--request-timeout must be above 0 seconds; leave it out")
        if not (self.log_interval >= 0 and math.isfinite(self.log_interval)):
            raise InvalidConfigError("--log-interval must be 0 seconds (no log line) or more")
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)
        if self.profile_folder is not None:
            try:
                self.profile_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidConfigError(
                    f"--profile-folder {self.profile_folder}: {error.strerror}"
                ) from None
