"""``/metrics``: what the event stream told, under vLLM's names, so that dashboards carry over.

One subscriber counts in plain Python on the engine's thread. prometheus_client, which takes a
hundred milliseconds to import, only formats, and is imported by the first scrape.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.events import (
    Admitted,
    Answered,
    Event,
    Finished,
    Preempted,
    Queued,
    RequestEvent,
    Resumed,
    StepCompleted,
    TokensEmitted,
)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

HEARD = (
    Admitted,
    Answered,
    Finished,
    Preempted,
    Queued,
    Resumed,
    StepCompleted,
    TokensEmitted,
)
"""The types that ``EngineMetrics.observe`` counts; subscribe it to these, so that no others are
built for it."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "vllm:"
COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests that lost their KV blocks.",
}
FINISH_REASONS = ("stop", "length", "abort", "error")

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))


class Histogram:
    """Counts per bucket (``le`` upper bounds) and their sum."""

    def __init__(self, help: str, bounds: Sequence[float]) -> None:
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, observations up to it), the last bound +Inf; and the sum."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._sum


@dataclass(slots=True)
class _Progress:
    """Times of one running request, in seconds of the event stream's clock."""

    queued: float
    last_token: float | None = None
    running: bool = False


class EngineMetrics:
    """Subscribes to one engine's events; ``observe`` runs on the engine's thread.

    ``render`` may run on another: it reads numbers that only grow, and at worst misses a step that
    is under way.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._progress: dict[str, _Progress] = {}
        self._unanswered: set[str] = set()
        self._answered = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._num_running = 0
        self._num_waiting = 0
        self._kv_usage = 0.0
        self._histograms = {
            "time_to_first_token_seconds": Histogram(
                "From a request's arrival to its first token.", TTFT_BUCKETS
            ),
            "inter_token_latency_seconds": Histogram(
                "Between two consecutive tokens of a request.", ITL_BUCKETS
            ),
            "e2e_request_latency_seconds": Histogram(
                "From a request's arrival to its end.", LATENCY_BUCKETS
            ),
            "request_queue_time_seconds": Histogram(
                "From a request's arrival to its admission.", LATENCY_BUCKETS
            ),
            "request_prompt_tokens": Histogram("Prompt tokens of a request.", TOKEN_BUCKETS),
            "request_generation_tokens": Histogram("Output tokens of a request.", TOKEN_BUCKETS),
            "iteration_tokens_total": Histogram("Tokens computed in a step.", TOKEN_BUCKETS),
        }

    def observe(self, event: Event) -> None:
        """Takes in one event. Of requests that were queued before it subscribed it ignores all."""
        if isinstance(event, Answered):
            self._on_answered(event)  # before or after its Finished
            return
        if (
            isinstance(event, RequestEvent)
            and event.request_id not in self._progress
            and not isinstance(event, Queued)
        ):
            return
        match event:
            case TokensEmitted():
                self._on_tokens(event)
            case StepCompleted():
                self._kv_usage = event.num_used_blocks / event.num_total_blocks
                self._histograms["iteration_tokens_total"].observe(event.num_tokens)
            case Queued():
                self._progress[event.request_id] = _Progress(event.time)
                self._unanswered.add(event.request_id)
                self._num_waiting += 1
            case Admitted():
                self._on_admitted(event)
            case Resumed():
                self._set_running(self._progress[event.request_id], True)
            case Preempted():
                self._counters["num_preemptions"] += 1
                self._set_running(self._progress[event.request_id], False)
            case Finished():
                self._on_finished(event)

    def _on_admitted(self, event: Admitted) -> None:
        progress = self._progress[event.request_id]
        self._set_running(progress, True)
        self._counters["prompt_tokens"] += event.num_prompt_tokens
        self._counters["prefix_cache_queries"] += event.num_queried_tokens
        self._counters["prefix_cache_hits"] += event.num_cached_tokens
        self._histograms["request_queue_time_seconds"].observe(event.time - progress.queued)

    def _on_tokens(self, event: TokensEmitted) -> None:
        progress = self._progress[event.request_id]
        self._counters["generation_tokens"] += len(event.token_ids)
        if progress.last_token is None:
            ttft = event.time - progress.queued
            self._histograms["time_to_first_token_seconds"].observe(ttft)
        else:
            gap = event.time - progress.last_token
            self._histograms["inter_token_latency_seconds"].observe(gap)
        progress.last_token = event.time

    def _on_answered(self, event: Answered) -> None:
        if event.request_id in self._unanswered:  # else it was refused, and never queued
            self._unanswered.remove(event.request_id)
            self._answered[event.reason] += 1

    def _on_finished(self, event: Finished) -> None:
        progress = self._progress.pop(event.request_id)
        self._set_running(progress, False)
        self._num_waiting -= 1
        if not self._progress:
            # No step follows the last request's end, so none would tell.
            self._kv_usage = 0.0
        latency = event.time - progress.queued
        self._histograms["e2e_request_latency_seconds"].observe(latency)
        self._histograms["request_prompt_tokens"].observe(event.num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(event.num_output_tokens)

    def _set_running(self, progress: _Progress, running: bool) -> None:
        change = running - progress.running
        self._num_running += change
        self._num_waiting -= change
        progress.running = running

    def render(self) -> bytes:
        """The exposition in Prometheus's text format.

        Raises:
            InvalidConfigError: prometheus_client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry, generate_latest
        except ImportError:
            raise InvalidConfigError(
                "/metrics needs prometheus_client: pip install 'mini-infer[serve]'"
            ) from None
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator["Metric"]:
        """The metrics, as prometheus_client asks a collector for them."""
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        names, values = ["model_name", "engine"], [self._config.served_model_name, "0"]
        gauges = {
            "num_requests_running": ("Requests that hold KV blocks.", self._num_running),
            "num_requests_waiting": ("Requests that wait, preempted ones too.", self._num_waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", self._kv_usage),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, count in self._counters.items():
            counter = CounterMetricFamily(PREFIX + name, COUNTERS[name], labels=names)
            counter.add_metric(values, count)
            yield counter
        finished = CounterMetricFamily(
            PREFIX + "request_success",
            "Requests that were answered, by the reason told; each of n choices is one.",
            labels=[*names, "finished_reason"],
        )
        for reason, count in self._answered.items():
            finished.add_metric([*values, reason], count)
        yield finished
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(PREFIX + name, histogram.help, labels=names)
            family.add_metric(values, *histogram.cumulative())
            yield family
