"""Latencies and throughput as ``vllm bench serve`` defines them.

Time to first token (TTFT) and end-to-end latency (E2EL) count from the moment a request is sent.
Time per output token (TPOT) is, per request, the time after the first token over the number of
tokens after the first; inter-token latency (ITL) is each gap between two pieces of a stream, of all
requests together. Goodput (DistServe, OSDI 2024) counts the requests that met all objectives.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer.cli.load.client import Record
from mini_infer.core.errors import InvalidConfigError

PERCENTS = (90, 99)
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


@dataclass(frozen=True, slots=True)
class Objective:
    """A service-level objective: a request's ``metric`` is at most ``milliseconds``.

    For ``itl`` that holds of each of the request's gaps.
    """

    metric: str
    milliseconds: float

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Reads ``ttft:200``. Raises InvalidConfigError: it is nothing of that form."""
        metric, _, value = text.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if metric not in NAMES or not milliseconds > 0:
            raise InvalidConfigError(
                f"--goodput: {text!r:.80} is no objective such as ttft:200 (milliseconds); "
                f"there are {', '.join(NAMES)}"
            )
        return cls(metric, milliseconds)

    def is_met(self, record: Record) -> bool:
        return all(1e3 * value <= self.milliseconds for value in values_of(record, self.metric))


def values_of(record: Record, metric: str) -> Sequence[float]:
    """A request's values of one metric, in seconds."""
    if metric == "itl":
        return record.itls
    value = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}[metric]
    return () if value is None else (value,)


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between the two nearest values, as ``numpy.percentile``."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def samples_of(records: Sequence[Record], metric: str) -> list[float]:
    """All values of a metric, in milliseconds, of the requests that were answered."""
    return [
        1e3 * value
        for record in records
        if record.error is None
        for value in values_of(record, metric)
    ]


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, percentiles and the worst; {} of no values."""
    if not values:
        return {}
    percentiles = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        **percentiles,
        "max": max(values),
    }


def figures(records: Sequence[Record], objectives: Sequence[Objective] = ()) -> dict[str, Any]:
    """Everything that a run is summed up by; latencies are in milliseconds, by their short names.

    Throughput is over the time from the first request sent to the last one answered.
    """
    answered = [record for record in records if record.error is None]
    seconds = 0.0
    if records:
        start = min(record.start for record in records)
        seconds = max(record.start + record.latency for record in records) - start
    num_prompt_tokens = sum(record.num_prompt_tokens for record in answered)
    num_output_tokens = sum(record.num_output_tokens for record in answered)

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    result: dict[str, Any] = {
        "completed": len(answered),
        "failed": len(records) - len(answered),
        "seconds": seconds,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "requests_per_second": rate(len(answered)),
        "output_tokens_per_second": rate(num_output_tokens),
        "total_tokens_per_second": rate(num_prompt_tokens + num_output_tokens),
        "peak_concurrency": peak_concurrency(records),
        "errors": count_errors(records),
    }
    if objectives:
        good = sum(all(item.is_met(record) for item in objectives) for record in answered)
        result["good_requests"] = good
        result["goodput"] = rate(good)
    for metric in NAMES:
        result[f"{metric}_ms"] = summarise(samples_of(records, metric))
    return result


def count_errors(records: Sequence[Record]) -> Mapping[str, int]:
    """How often each error came, the most frequent first."""
    return dict(Counter(record.error for record in records if record.error).most_common())


def peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests that were under way at one time."""
    changes = [(record.start, 1) for record in records]
    changes += [(record.start + record.latency, -1) for record in records]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
