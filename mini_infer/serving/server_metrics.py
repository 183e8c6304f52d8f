"""The metrics of a server: those of its engines, side by side in ``/metrics``, summed in the log.

As in vLLM, each sample of ``/metrics`` has its engine's number as the label ``engine``; whoever
reads them sums over it.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

from mini_infer.core.draft_counts import DraftCounts
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError
from mini_infer.runtime.engine_client import ServerEvents
from mini_infer.serving.metrics import HEARD, EngineMetrics, Totals

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class ServerMetrics:
    """Has an ``EngineMetrics`` for each engine. ``render`` and ``totals`` may run on any thread."""

    def __init__(self, config: EngineConfig, num_engines: int = 1) -> None:
        self.engines = [EngineMetrics(config, index) for index in range(num_engines)]

    def subscribe(self, events: ServerEvents) -> None:
        """Counts from now on."""
        for metrics, of_engine in zip(self.engines, events.engines, strict=True):
            of_engine.subscribe(metrics.observe, *HEARD)

    def totals(self) -> Totals:
        """Sums over all engines; ``kv_usage`` is their mean, as their pools are of one size."""
        each = [metrics.totals() for metrics in self.engines]
        drafts = [totals.drafts for totals in each if totals.drafts is not None]
        return Totals(
            sum(totals.prompt_tokens for totals in each),
            sum(totals.generation_tokens for totals in each),
            sum(totals.prefix_cache_queries for totals in each),
            sum(totals.prefix_cache_hits for totals in each),
            sum(totals.num_running for totals in each),
            sum(totals.num_waiting for totals in each),
            sum(totals.kv_usage for totals in each) / len(each),
            _summed(drafts) if drafts else None,
        )

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
        """The metrics, as prometheus_client asks a collector for them. All engines have the same
        ones in the same order."""
        for first, *others in zip(*(one.collect() for one in self.engines), strict=True):
            for other in others:
                first.samples += other.samples
            yield first


def _summed(counts: list[DraftCounts]) -> DraftCounts:
    def by_position(numbers: list[list[int]]) -> list[int]:
        return [sum(position) for position in zip_longest(*numbers, fillvalue=0)]

    return DraftCounts(
        sum(one.num_verifications for one in counts),
        by_position([one.proposed for one in counts]),
        by_position([one.accepted for one in counts]),
        sum(one.seconds for one in counts),
        sum(one.plain_seconds for one in counts),
        sum(one.num_reached for one in counts),
    )
