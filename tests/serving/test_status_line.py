"""The log line: what the totals gained between two looks, and when it says nothing."""

import logging
import threading
from dataclasses import replace

import pytest

from mini_infer import SamplingParams
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.events import (
    Admitted,
    DraftsVerified,
    Event,
    Finished,
    Queued,
    StepCompleted,
    TokensEmitted,
)
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.runtime.engine import LLMEngine
from mini_infer.serving.metrics import HEARD, EngineMetrics
from mini_infer.serving.options import ServerOptions
from mini_infer.serving.status_line import StatusLine, status_logger
from tests.serving.live import PATIENCE


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics(LLMEngine.from_options(dry_run=True).config)


def tell(metrics: EngineMetrics, *events: Event) -> None:
    for event in events:
        metrics.observe(event)


def started(metrics: EngineMetrics) -> StatusLine:
    status = StatusLine(metrics, 5.0)
    assert status.line(10.0) is None
    return status


def test_a_line_has_rates_of_its_interval_and_the_state_now(metrics: EngineMetrics) -> None:
    status = started(metrics)
    tell(
        metrics,
        Queued(10.0, "a", 100),
        Queued(10.0, "b", 100),
        Admitted(10.0, "a", 100, 25, 100),
        StepCompleted(11.0, 0, 75, 1, 1, 0, 5, 20),
        TokensEmitted(11.0, "a", (5,), 1),
        TokensEmitted(12.0, "a", (5,), 2),
    )
    assert status.line(14.0) == (
        "requests: 1 running, 1 waiting; tokens/s: 25.0 prompt, 0.5 generation; "
        "KV cache: 25.0% in use; prefix hits: 25.0%"
    )
    tell(metrics, *(TokensEmitted(15.0, "a", (5,), 3) for _ in range(8)))
    assert status.line(18.0) == (
        "requests: 1 running, 1 waiting; tokens/s: 0.0 prompt, 2.0 generation; "
        "KV cache: 25.0% in use; prefix hits: none looked up"
    )


def test_a_line_tells_how_drafts_fared_in_its_interval(metrics: EngineMetrics) -> None:
    config = metrics._config
    speculating = replace(config, speculative_config=SpeculativeConfig(method="ngram"))
    metrics = EngineMetrics(speculating)
    status = started(metrics)

    def drafts(now: float) -> str:
        return (status.line(now) or "").rpartition("; ")[2]

    tell(metrics, Queued(10.0, "a", 100), Admitted(10.0, "a", 100, 0, 100))
    assert drafts(15.0) == "drafts: none"
    tell(metrics, DraftsVerified(16.0, "a", 1, 1, 0.5, 1.0))
    assert drafts(20.0) == (
        "drafts: 100.0% accepted (by position 100%), 2.00 tokens a verification, speed-up 2.00"
    )
    tell(metrics, DraftsVerified(21.0, "a", 2, 1), DraftsVerified(22.0, "a", 2, 0))
    assert drafts(25.0) == (
        "drafts: 25.0% accepted (by position 50%, 0%), 1.50 tokens a verification"
    )
    tell(metrics, DraftsVerified(26.0, "a", 1, 1))
    assert drafts(30.0) == (
        "drafts: 100.0% accepted (by position 100%, -), 2.00 tokens a verification"
    )
    assert drafts(35.0) == "drafts: none"


def test_nothing_is_said_without_work(metrics: EngineMetrics) -> None:
    status = started(metrics)
    assert status.line(15.0) is None
    tell(metrics, Queued(16.0, "a", 100))
    assert "0 running, 1 waiting" in (status.line(20.0) or "")
    tell(metrics, Admitted(21.0, "a", 100, 0, 100), Finished(22.0, "a", "stop", 100, 1))
    # All of it began and ended since the last line.
    assert "20.0 prompt" in (status.line(25.0) or "")
    assert status.line(30.0) is None


def test_the_thread_logs_until_it_is_stopped(
    metrics: EngineMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    tell(metrics, Queued(1.0, "a", 100))
    logged = threading.Event()

    class Waker(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    waker, status = Waker(), StatusLine(metrics, 0.001)
    status_logger.addHandler(waker)
    try:
        with caplog.at_level(logging.INFO, status_logger.name), status:
            assert logged.wait(PATIENCE)
    finally:
        status_logger.removeHandler(waker)
    assert "0 running, 1 waiting" in caplog.text


@pytest.mark.parametrize(("interval", "num_threads"), [(0.0, 0), (60.0, 1)], ids=["off", "on"])
def test_it_has_a_thread_if_it_is_asked_to(
    metrics: EngineMetrics, interval: float, num_threads: int
) -> None:
    before = set(threading.enumerate())
    with StatusLine(metrics, interval):
        threads = set(threading.enumerate()) - before
    assert len(threads) == num_threads
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("interval", [-1.0, float("nan"), float("inf")])
def test_an_interval_that_never_ends_is_refused(interval: float) -> None:
    with pytest.raises(InvalidConfigError, match="--log-interval"):
        ServerOptions(log_interval=interval)


def test_it_needs_no_event_beyond_those_of_the_metrics() -> None:
    """Reading totals keeps the cost of a step what it is."""
    engine = LLMEngine.from_options(dry_run=True)
    metrics = EngineMetrics(engine.config)
    engine.events.subscribe(metrics.observe, *HEARD)
    status = StatusLine(metrics, 5.0)
    status.line(1.0)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    while engine.has_unfinished():
        engine.step()
    assert "0 running, 0 waiting" in (status.line(2.0) or "")
