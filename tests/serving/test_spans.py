"""Spans of requests: their tree, their times, the caller's trace, and the way to a collector."""

import atexit
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mini_infer import SamplingParams
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.events import (
    Admitted,
    Answered,
    Event,
    EventStream,
    Finished,
    Preempted,
    Queued,
    Resumed,
    TokensEmitted,
)
from mini_infer.runtime.engine import LLMEngine
from mini_infer.serving.options import ServerOptions
from mini_infer.serving.spans import MAX_EXPECTED, NoSpans, RequestSpans, open_spans
from tests.serving.live import MODEL, live_server, wait_for

TRACE, CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
SAMPLED = {"traceparent": f"00-{TRACE:032x}-{CALLER:016x}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE:032x}-{CALLER:016x}-00"}

ONE_REQUEST: list[Event] = [
    Queued(1.0, "a", 10, 6),
    Admitted(1.25, "a", 10, 4),
    Finished(4.0, "a", "length", 10, 3, 2.0, 3.5),
    Answered(4.5, "a", "stop"),
]


class Traced:
    """A stream of events whose clock stands at 0.5, and the spans that come of it."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.events = EventStream(lambda: 0.5)
        self.spans = RequestSpans(provider.get_tracer("t"), self.events, "m")

    def tell(self, *events: Event) -> None:
        for event in events:
            self.events.emit(event)

    def finished(self) -> Sequence[ReadableSpan]:
        self.spans._writer.submit(int).result()
        return self.exporter.get_finished_spans()

    def by_name(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.finished()}


@pytest.fixture
def traced() -> Traced:
    return Traced()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1e9, 3)


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_a_span_with_three_children(traced: Traced) -> None:
    traced.tell(*ONE_REQUEST)
    spans = traced.by_name()
    assert {name: seconds(span) for name, span in spans.items()} == {
        "queue": 0.25,
        "prefill": 0.75,
        "decode": 1.5,
        "llm_request": 3.5,
    }
    request = spans.pop("llm_request")
    assert request.kind is SpanKind.SERVER
    assert parent_id(request) is None
    assert {parent_id(span) for span in spans.values()} == {request.context.span_id}
    assert {span.context.trace_id for span in spans.values()} == {request.context.trace_id}
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert attributes(spans["prefill"])["mini_infer.num_cached_tokens"] == 4
    told = attributes(request)
    assert told["gen_ai.request.model"] == "m"
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (10, 3)


@pytest.mark.parametrize("order", [(2, 3), (3, 2)], ids=["answered last", "answered first"])
def test_it_ends_when_it_is_both_finished_and_answered(
    traced: Traced, order: tuple[int, int]
) -> None:
    traced.tell(*ONE_REQUEST[:2], ONE_REQUEST[order[0]])
    assert not traced.by_name()
    traced.tell(ONE_REQUEST[order[1]])
    assert len(traced.by_name()) == 4


def test_the_callers_trace_goes_on_from_its_arrival(traced: Traced) -> None:
    traced.spans.expect(["a"], SAMPLED)
    traced.tell(*ONE_REQUEST)
    request = traced.by_name()["llm_request"]
    assert request.context.trace_id == TRACE
    assert parent_id(request) == CALLER
    assert seconds(request) == 4.0


def test_a_trace_that_is_not_sampled_is_left_alone(traced: Traced) -> None:
    traced.spans.expect(["a"], NOT_SAMPLED)
    traced.tell(*ONE_REQUEST)
    assert not traced.by_name()


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-01", f"00-{0:032x}-{0:016x}-01"])
def test_a_broken_traceparent_starts_a_trace(traced: Traced, header: str) -> None:
    traced.spans.expect(["a"], {"traceparent": header})
    traced.tell(*ONE_REQUEST)
    assert parent_id(traced.by_name()["llm_request"]) is None


def test_choices_share_the_request(traced: Traced) -> None:
    traced.spans.expect(["a"], SAMPLED)
    for index in range(2):
        traced.tell(Queued(1.0, f"a#{index}", 10, 6, 2))
    for index in range(2):
        traced.tell(
            Admitted(1.5, f"a#{index}", 10, 0),
            Finished(3.0, f"a#{index}", "length", 10, 3, 2.0, 2.5),
            Answered(3.0, f"a#{index}", "length"),
        )
    spans = traced.finished()
    [request] = [span for span in spans if span.name == "llm_request"]
    assert len(spans) == 7
    assert parent_id(request) == CALLER
    assert attributes(request)["gen_ai.usage.output_tokens"] == 6
    decodes = [attributes(span) for span in spans if span.name == "decode"]
    assert [told["mini_infer.choice_id"] for told in decodes] == ["a#0", "a#1"]


@pytest.mark.parametrize(
    ("events", "phases"),
    [
        ([], {"queue": 2.0}),
        ([Admitted(1.5, "a", 10, 0)], {"queue": 0.5, "prefill": 1.5}),
    ],
    ids=["while it waits", "in its prompt"],
)
def test_an_aborted_request_has_the_phases_that_it_reached(
    traced: Traced, events: list[Event], phases: dict[str, float]
) -> None:
    traced.tell(Queued(1.0, "a", 10, 6), *events)
    traced.tell(Finished(3.0, "a", "abort", 10, 0), Answered(3.0, "a", "abort"))
    spans = traced.by_name()
    del spans["llm_request"]
    assert {name: seconds(span) for name, span in spans.items()} == phases


def test_preemptions_are_events_and_errors_a_status(traced: Traced) -> None:
    traced.tell(*ONE_REQUEST[:2], Preempted(2.5, "a", 12), Resumed(3.0, "a", 8))
    traced.tell(Finished(4.0, "a", "error", 10, 3, 2.0, 3.5), Answered(4.0, "a", "error"))
    spans = traced.by_name()
    [event] = spans["decode"].events
    assert (event.name, dict(event.attributes or {})) == (
        "preempted",
        {"mini_infer.num_computed_tokens": 12},
    )
    assert not spans["prefill"].events
    assert spans["llm_request"].status.status_code is StatusCode.ERROR


def test_what_was_refused_or_came_before_leaves_nothing(traced: Traced) -> None:
    traced.spans.expect(["refused"], SAMPLED)
    traced.tell(Answered(1.0, "refused", "abort"), *ONE_REQUEST[1:])
    assert not traced.by_name()
    traced.spans.expect(map(str, range(MAX_EXPECTED + 10)), {})
    assert len(traced.spans._expected) == MAX_EXPECTED
    assert "refused" not in traced.spans._expected


def test_spans_that_fail_are_told_of_and_cost_nothing_else(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(traced.spans, "_tracer", None)
        traced.tell(*ONE_REQUEST)
        assert not traced.finished()
    assert "the spans of request a are lost" in caplog.text
    traced.tell(*ONE_REQUEST)
    assert len(traced.finished()) == 4


def test_tokens_are_not_listened_to(traced: Traced) -> None:
    assert not traced.events.wants(TokensEmitted)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A URL, and (path, body) of what was sent there."""
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


def test_an_engines_requests_reach_the_collector(
    collector: tuple[str, list[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, received = collector
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    engine = LLMEngine.from_options(dry_run=True)
    spans = open_spans(url, engine.events, "m")
    spans.expect(["a"], SAMPLED)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, n=2))
    while engine.has_unfinished():
        engine.step()
    assert isinstance(spans, RequestSpans)
    spans._writer.shutdown()  # as Python does before it exits
    for function in at_exit:
        function()
    [(path, body)] = received
    assert path == "/v1/traces"
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    service = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert service["service.name"] == "mini-infer"
    assert service["deployment.environment"] == "test"
    [scope] = resource.scope_spans
    assert sorted(span.name for span in scope.spans) == [
        *("decode", "decode", "llm_request", "prefill", "prefill", "queue", "queue")
    ]
    assert {span.trace_id for span in scope.spans} == {TRACE.to_bytes(16, "big")}


def test_a_servers_requests_carry_on_the_callers_trace(
    collector: tuple[str, list[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, received = collector
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")

    def requests() -> list[Any]:
        return [
            span
            for path, body in received
            if path == "/custom"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name == "llm_request"
        ]

    with live_server(ServerOptions(otlp_endpoint=url + "/custom")) as server:
        server.client.headers.update(SAMPLED)
        assert server.chat(max_tokens=2).status_code == 200
        assert server.complete(["a", "b"], max_tokens=2).status_code == 200
        response = server.client.post("/v1/responses", json={"model": MODEL, "input": "Hello"})
        assert response.status_code == 200
        wait_for(lambda: len(requests()) == 4)
    assert {span.parent_span_id for span in requests()} == {CALLER.to_bytes(8, "big")}


def test_without_an_endpoint_nobody_listens() -> None:
    events = EventStream()
    spans = open_spans(None, events, "m")
    spans.expect(["a"], SAMPLED)
    assert isinstance(spans, NoSpans)
    assert not events.wants(Queued)


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "grpc://host:4317", "http://", "http://h:port"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidConfigError, match="--otlp-endpoint"):
        ServerOptions(otlp_endpoint=endpoint)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidConfigError, match=r"opentelemetry-sdk.*mini-infer\[otel\]"):
        open_spans("http://localhost:4318", EventStream(), "m")
