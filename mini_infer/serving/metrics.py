"""``/metrics``: what the event stream told, under vLLM's names, so that dashboards carry over.

One subscriber counts in plain Python in the server's process, so that no step waits for it.
prometheus_client, which takes a hundred milliseconds to import, only formats, and is imported by
the first scrape (``ServerMetrics.render``).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mini_infer.core.draft_counts import DraftCounts
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.events import (
    Admitted,
    Answered,
    DraftsVerified,
    Event,
    Finished,
    Preempted,
    Queued,
    Rerouted,
    Resumed,
    StepCompleted,
    TokensEmitted,
)
from mini_infer.serving.draft_metrics import draft_metrics, snapshot
from mini_infer.serving.histogram import (
    CHOICES_BOUNDS,
    REQUEST_LATENCY_BOUNDS,
    STEP_TOKEN_BOUNDS,
    TOKEN_LATENCY_BOUNDS,
    TTFT_BOUNDS,
    Histogram,
    one_two_five,
)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Value = TypeVar("Value")

HEARD = (
    Admitted,
    Answered,
    DraftsVerified,
    Finished,
    Preempted,
    Queued,
    Rerouted,
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
    "prompt_tokens_cached": "Prompt tokens of admitted requests that were not computed.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests that lost their KV blocks.",
}
FINISH_REASONS = ("stop", "length", "abort", "error")
OLD_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
"""What vLLM called them once, and dashboards still do: the same numbers a second time."""


@dataclass(slots=True)
class _Progress:
    """Times of one running choice, in seconds of the event stream's clock."""

    queued: float
    caller_id: str
    max_tokens: int
    admitted: float | None = None
    num_cached_tokens: int = 0
    first_token: float | None = None
    last_token: float = 0.0
    running: bool = False


@dataclass(slots=True)
class _Caller:
    """A caller's request: its choices that run, and the length of the longest that ended."""

    num_running: int = 0
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """What the log line tells: totals since the start, and the state now."""

    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the KV blocks in use, 0 to 1."""
    drafts: DraftCounts | None
    """None where speculation is not configured."""


class EngineMetrics:
    """Subscribes to one engine's events; ``observe`` runs where they are emitted.

    ``collect`` and ``totals`` may run on another thread: they read numbers that only grow, and at
    worst miss a step that is under way.
    """

    def __init__(self, config: EngineConfig, engine: int = 0) -> None:
        self._config = config
        self._engine = engine
        self._progress: dict[str, _Progress] = {}
        self._callers: dict[str, _Caller] = {}
        self._unanswered: set[str] = set()
        self._answered = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._num_running = 0
        self._num_waiting = 0
        self._kv_usage = 0.0
        self._drafts = DraftCounts()
        self._histograms = _make_histograms(config.max_model_len)
        self._time_to_first_token = self._histograms["time_to_first_token_seconds"]
        self._inter_token_latency = self._histograms["inter_token_latency_seconds"]
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Admitted: self._on_admitted,
            Answered: self._on_answered,
            DraftsVerified: self._on_drafts,
            Finished: self._on_finished,
            Preempted: self._on_preempted,
            Queued: self._on_queued,
            Rerouted: self._on_rerouted,
            Resumed: self._on_resumed,
            StepCompleted: self._on_step,
            TokensEmitted: self._on_tokens,
        }

    def observe(self, event: Event) -> None:
        """Takes in one event. Of requests that were queued before it subscribed it ignores all."""
        self._handlers[type(event)](event)

    def totals(self) -> Totals:
        counters = self._counters
        return Totals(
            counters["prompt_tokens"],
            counters["generation_tokens"],
            counters["prefix_cache_queries"],
            counters["prefix_cache_hits"],
            self._num_running,
            self._num_waiting,
            self._kv_usage,
            None if self._config.speculative_config is None else snapshot(self._drafts),
        )

    # --- events ---

    def _on_tokens(self, event: TokensEmitted) -> None:
        progress = self._progress.get(event.request_id)
        if progress is None:
            return
        time = event.time
        self._counters["generation_tokens"] += len(event.token_ids)
        if progress.first_token is None:
            progress.first_token = time
            self._time_to_first_token.observe(time - progress.queued)
        else:
            self._inter_token_latency.observe(time - progress.last_token)
        progress.last_token = time

    def _on_drafts(self, event: DraftsVerified) -> None:
        if event.request_id in self._progress:
            self._drafts.add(
                event.num_drafts, event.num_accepted, event.seconds, event.plain_seconds
            )

    def _on_step(self, event: StepCompleted) -> None:
        self._kv_usage = event.num_used_blocks / event.num_total_blocks
        self._histograms["iteration_tokens_total"].observe(event.num_tokens)

    def _on_queued(self, event: Queued) -> None:
        caller_id = event.caller_id
        self._progress[event.request_id] = _Progress(event.time, caller_id, event.max_tokens)
        caller = self._callers.get(caller_id)
        if caller is None:
            caller = self._callers[caller_id] = _Caller()
            self._histograms["request_params_n"].observe(event.num_choices)
        caller.num_running += 1
        self._unanswered.add(event.request_id)
        self._num_waiting += 1

    def _on_admitted(self, event: Admitted) -> None:
        progress = self._progress.get(event.request_id)
        if progress is None:
            return
        self._set_running(progress, True)
        progress.admitted = event.time
        progress.num_cached_tokens = event.num_cached_tokens
        self._counters["prompt_tokens"] += event.num_prompt_tokens
        self._counters["prompt_tokens_cached"] += event.num_cached_tokens
        self._counters["prefix_cache_queries"] += event.num_queried_tokens
        self._counters["prefix_cache_hits"] += event.num_cached_tokens
        self._histograms["request_queue_time_seconds"].observe(event.time - progress.queued)

    def _on_preempted(self, event: Preempted) -> None:
        progress = self._progress.get(event.request_id)
        if progress is not None:
            self._counters["num_preemptions"] += 1
            self._set_running(progress, False)

    def _on_resumed(self, event: Resumed) -> None:
        progress = self._progress.get(event.request_id)
        if progress is not None:
            self._set_running(progress, True)

    def _on_answered(self, event: Answered) -> None:
        """Comes before or after its Finished."""
        if event.request_id in self._unanswered:  # else it was refused, and never queued
            self._unanswered.remove(event.request_id)
            self._answered[event.reason] += 1

    def _on_finished(self, event: Finished) -> None:
        progress = self._progress.pop(event.request_id, None)
        if progress is None:
            return
        self._end(progress)
        histograms, num_output_tokens = self._histograms, event.num_output_tokens
        histograms["e2e_request_latency_seconds"].observe(event.time - progress.queued)
        histograms["request_prompt_tokens"].observe(event.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(num_output_tokens)
        histograms["request_params_max_tokens"].observe(progress.max_tokens)
        self._observe_phases(progress, event)
        caller = self._callers[progress.caller_id]
        caller.num_running -= 1
        caller.longest = max(caller.longest, num_output_tokens)
        if caller.num_running == 0:
            del self._callers[progress.caller_id]
            histograms["request_max_num_generation_tokens"].observe(caller.longest)

    def _on_rerouted(self, event: Rerouted) -> None:
        """Another engine counts it anew."""
        progress = self._progress.pop(event.request_id, None)
        if progress is not None:
            self._end(progress)
            self._unanswered.discard(event.request_id)
            self._callers.pop(progress.caller_id, None)

    def _end(self, progress: _Progress) -> None:
        self._set_running(progress, False)
        self._num_waiting -= 1
        if not self._progress:
            # No step follows the last request's end, so none would tell.
            self._kv_usage = 0.0

    def _observe_phases(self, progress: _Progress, event: Finished) -> None:
        """Prefill and decode, of a request that had a token."""
        if progress.admitted is None or progress.first_token is None:
            return
        histograms, decode = self._histograms, progress.last_token - progress.first_token
        histograms["request_prefill_time_seconds"].observe(progress.first_token - progress.admitted)
        histograms["request_decode_time_seconds"].observe(decode)
        histograms["request_inference_time_seconds"].observe(
            progress.last_token - progress.admitted
        )
        histograms["request_prefill_kv_computed_tokens"].observe(
            event.num_prompt_tokens - progress.num_cached_tokens
        )
        if event.num_output_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(
                decode / (event.num_output_tokens - 1)
            )

    def _set_running(self, progress: _Progress, running: bool) -> None:
        change = running - progress.running
        self._num_running += change
        self._num_waiting -= change
        progress.running = running

    # --- a scrape ---

    def collect(self) -> Iterator["Metric"]:
        """The metrics, as prometheus_client asks a collector for them."""
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        config = self._config
        names, values = ["model_name", "engine"], [config.served_model_name, str(self._engine)]
        gauges = {
            "num_requests_running": ("Requests that hold KV blocks.", self._num_running),
            "num_requests_waiting": ("Requests that wait, preempted ones too.", self._num_waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", self._kv_usage),
        }
        for name, (text, value) in _and_old(gauges):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        cache = {
            "block_size": config.block_size,
            "cache_dtype": config.dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "num_gpu_blocks": config.num_kv_blocks,
        }
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info", "The KV cache; always 1.", labels=[*names, *cache]
        )
        info.add_metric([*values, *map(str, cache.values())], 1)
        yield info
        counters = {name: (COUNTERS[name], count) for name, count in self._counters.items()}
        for name, (text, count) in _and_old(counters):
            counter = CounterMetricFamily(PREFIX + name, text, labels=names)
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
        speculation = config.speculative_config
        if speculation is not None:
            yield from draft_metrics(
                self._drafts, speculation.num_speculative_tokens, names, values
            )
        for name, histogram in _and_old(self._histograms):
            family = HistogramMetricFamily(PREFIX + name, histogram.help, labels=names)
            family.add_metric(values, *histogram.cumulative())
            yield family


def _make_histograms(max_model_len: int) -> dict[str, Histogram]:
    tokens = one_two_five(max_model_len)
    of_requests = {
        "e2e_request_latency_seconds": "From a request's arrival to its end.",
        "request_queue_time_seconds": "From a request's arrival to its admission.",
        "request_prefill_time_seconds": "From a request's admission to its first token.",
        "request_decode_time_seconds": "From a request's first token to its last.",
        "request_inference_time_seconds": "From a request's admission to its last token.",
    }
    of_tokens = {
        "inter_token_latency_seconds": "Between two consecutive tokens of a request.",
        "request_time_per_output_token_seconds": "Mean gap between the tokens of a request.",
    }
    counts = {
        "request_prompt_tokens": "Prompt tokens of a request.",
        "request_generation_tokens": "Output tokens of a request.",
        "request_prefill_kv_computed_tokens": "Prompt tokens that no cache hit spared a request.",
        "request_params_max_tokens": "Output tokens that a request may have.",
        "request_max_num_generation_tokens": "Output tokens of the longest of a request's choices.",
    }
    return {
        "time_to_first_token_seconds": Histogram(
            "From a request's arrival to its first token.", TTFT_BOUNDS
        ),
        **{name: Histogram(text, TOKEN_LATENCY_BOUNDS) for name, text in of_tokens.items()},
        **{name: Histogram(text, REQUEST_LATENCY_BOUNDS) for name, text in of_requests.items()},
        **{name: Histogram(text, tokens) for name, text in counts.items()},
        "request_params_n": Histogram("Choices that a caller asked for.", CHOICES_BOUNDS),
        "iteration_tokens_total": Histogram("Tokens computed in a step.", STEP_TOKEN_BOUNDS),
    }


def _and_old(metrics: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    """Each metric under its name, and under its old one where it has one."""
    for name, value in metrics.items():
        yield name, value
        if name in OLD_NAMES:
            yield OLD_NAMES[name], value
