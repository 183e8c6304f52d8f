"""OpenTelemetry spans of requests: queue, prefill and decode, under the caller's own trace.

::

    caller's span (traceparent)
      +- llm_request       arrival ................................. end
           +- queue        queued ... admitted
           +- prefill                 admitted ... first token
           +- decode                               first token ... last token

A request's spans are made at its end, in a thread of their own, from events that come a few times
in its life; tokens are not listened to. With n choices there are n of each child. A caller whose
``traceparent`` says "not sampled" gets no spans.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.events import (
    Admitted,
    Answered,
    Event,
    EventStream,
    Finished,
    Preempted,
    Queued,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

PHASES = ("queue", "prefill", "decode")
TRACES_PATH = "/v1/traces"
MAX_EXPECTED = 4096
"""Requests whose caller is remembered before they are queued. Of those that are refused nobody
tells, so the oldest are forgotten."""


class Spans(Protocol):
    """What the server asks of either implementation."""

    def expect(self, request_ids: Iterable[str], headers: Mapping[str, str]) -> None:
        """Requests with these ids are about to be queued, for a caller with these headers."""


class NoSpans:
    """Implements ``Spans`` for a server without an endpoint."""

    def expect(self, request_ids: Iterable[str], headers: Mapping[str, str]) -> None:
        """Nothing is traced."""


def check_endpoint(endpoint: str) -> str:
    """The URL that spans for ``endpoint`` are sent to: one without a path gets /v1/traces.

    Raises:
        InvalidConfigError: no URL of HTTP, or OpenTelemetry is not installed.
    """
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidConfigError(
            f"--otlp-endpoint {endpoint!r:.200} is no URL of a collector: give one that takes OTLP "
            f"over HTTP, such as http://localhost:4318"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise InvalidConfigError(
            "--otlp-endpoint needs the packages opentelemetry-sdk and "
            "opentelemetry-exporter-otlp-proto-http: pip install 'mini-infer[otel]'"
        ) from None
    return parts._replace(path=TRACES_PATH).geturl() if parts.path in ("", "/") else endpoint


def open_spans(endpoint: str | None, events: EventStream, model: str) -> Spans:
    """Spans of all requests that ``events`` tells of, sent to ``endpoint`` in the background.

    ``endpoint`` is the URL of a collector that takes OTLP over HTTP. The environment variables of
    OpenTelemetry's SDK (``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_...``) are
    heeded. What is left when the process exits is sent then.

    Raises:
        InvalidConfigError: as ``check_endpoint`` does.
    """
    if endpoint is None:
        return NoSpans()
    url = check_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create().merge(Resource({"service.name": "mini-infer"}))
    # What the environment says about the service has the last word.
    provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return RequestSpans(provider.get_tracer("mini_infer"), events, model)


@dataclass(slots=True)
class _Choice:
    queued: Queued
    admitted: Admitted | None = None
    preempted: list[Preempted] = field(default_factory=list)
    finished: Finished | None = None
    answered: Answered | None = None


@dataclass(slots=True)
class _Caller:
    """A caller's request."""

    arrival: float
    context: "Context | None"
    choices: dict[str, _Choice] = field(default_factory=dict)


class RequestSpans:
    """Implements ``Spans``. What happens is only noted; spans are made later."""

    def __init__(self, tracer: "Tracer", events: EventStream, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._extract = TraceContextTextMapPropagator().extract
        self._model = model
        self._now = events.now
        self._epoch = time.time() - events.now()
        """What the events' clock lacks to the time of day, in seconds."""
        self._expected: dict[str, _Caller] = {}
        self._callers: dict[str, _Caller] = {}
        # Python waits for its work before the process exits, and only then for the exporter's.
        self._writer = ThreadPoolExecutor(1, "mini-infer-spans")
        events.subscribe(self._observe, Queued, Admitted, Preempted, Finished, Answered)

    def expect(self, request_ids: Iterable[str], headers: Mapping[str, str]) -> None:
        """Called by the event loop's thread, before the engine's hears of the requests."""
        context = self._extract(headers) if "traceparent" in headers else None
        for request_id in request_ids:
            self._expected[request_id] = _Caller(self._now(), context)
        while len(self._expected) > MAX_EXPECTED:
            self._expected.pop(next(iter(self._expected)), None)

    # --- events ---

    def _observe(self, event: Event) -> None:
        assert isinstance(event, Queued | Admitted | Preempted | Finished | Answered)
        if isinstance(event, Queued):
            self._on_queued(event)
            return
        caller_id = event.request_id
        if caller_id not in self._callers:
            caller_id = caller_id.rpartition("#")[0]
        caller = self._callers.get(caller_id)
        choice = caller.choices.get(event.request_id) if caller else None
        if caller is None or choice is None:  # refused, or queued before we listened
            self._expected.pop(event.request_id, None)
            return
        match event:
            case Admitted():
                choice.admitted = event
            case Preempted():
                choice.preempted.append(event)
            case Finished():
                choice.finished = event
            case Answered():
                choice.answered = event
        if all(item.finished and item.answered for item in caller.choices.values()):
            del self._callers[caller_id]
            self._writer.submit(self._write, caller_id, caller)

    def _on_queued(self, event: Queued) -> None:
        caller = self._callers.get(event.caller_id)
        if caller is None:
            caller = self._expected.pop(event.caller_id, None) or _Caller(event.time, None)
            self._callers[event.caller_id] = caller
        caller.choices[event.request_id] = _Choice(event)

    # --- writer's thread ---

    def _write(self, caller_id: str, caller: _Caller) -> None:
        try:
            self._write_request(caller_id, caller)
        except Exception:
            logger.exception("the spans of request %s are lost", caller_id)

    def _write_request(self, caller_id: str, caller: _Caller) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        choices = list(caller.choices.values())
        finished = [choice.finished for choice in choices if choice.finished]
        answered = [choice.answered for choice in choices if choice.answered]
        queued = choices[0].queued
        span = self._tracer.start_span(
            "llm_request",
            caller.context,
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": queued.max_tokens,
                "gen_ai.request.choice.count": queued.num_choices,
                "gen_ai.response.id": caller_id,
                "gen_ai.response.finish_reasons": [event.reason for event in answered],
                "gen_ai.usage.input_tokens": queued.num_prompt_tokens,
                "gen_ai.usage.output_tokens": sum(event.num_output_tokens for event in finished),
            },
            start_time=self._at(caller.arrival),
        )
        if any(event.reason == "error" for event in answered):
            span.set_status(StatusCode.ERROR)
        if span.is_recording():
            context = set_span_in_context(span)
            for choice in choices:
                self._write_phases(choice, context)
        span.end(self._at(max(event.time for event in (*finished, *answered))))

    def _write_phases(self, choice: _Choice, context: "Context") -> None:
        """The children of one choice: none for a phase that it did not reach."""
        finished, admitted = choice.finished, choice.admitted
        assert finished is not None
        first, last = finished.first_token_time, finished.last_token_time
        milestones = [choice.queued.time]
        milestones += [admitted.time] if admitted else []
        milestones += [first, last] if first is not None and last is not None else [finished.time]
        for name, start, end in zip(PHASES, milestones, milestones[1:], strict=False):
            self._write_phase(name, choice, context, start, end)

    def _write_phase(
        self, name: str, choice: _Choice, context: "Context", start: float, end: float
    ) -> None:
        """One child; preemptions within it are its events."""
        attributes: dict[str, str | int] = {"mini_infer.choice_id": choice.queued.request_id}
        if name == "prefill" and choice.admitted:
            attributes["mini_infer.num_cached_tokens"] = choice.admitted.num_cached_tokens
        span = self._tracer.start_span(
            name, context, attributes=attributes, start_time=self._at(start)
        )
        for event in choice.preempted:
            if start <= event.time < end:
                lost = {"mini_infer.num_computed_tokens": event.num_computed_tokens}
                span.add_event("preempted", lost, self._at(event.time))
        span.end(self._at(end))

    def _at(self, seconds: float) -> int:
        """A time of the events' clock as nanoseconds since 1970."""
        return int((self._epoch + seconds) * 1e9)
