"""Speculative decoding in ``/metrics`` and in the log line: vLLM's counters, and some of our own.

Like vLLM's, they are there where speculation is configured, and only there.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mini_infer.core.draft_counts import DraftCounts

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

VLLM = "vllm:spec_decode_"
OWN = "mini_infer:spec_decode_"
"""Of what vLLM does not tell: how many drafts there were at a position (here their number changes
from step to step), and what it all gains."""


def draft_metrics(
    counts: DraftCounts, num_positions: int, names: Sequence[str], values: Sequence[str]
) -> Iterator["Metric"]:
    """Counters of all drafts so far; ``names`` and ``values`` are labels that each one has.

    Those per position have ``num_positions`` samples, also while no draft stood there.
    """
    from prometheus_client.metrics_core import CounterMetricFamily

    totals = {
        VLLM + "num_drafts": (
            "Verifications: steps of requests that verified drafts.",
            counts.num_verifications,
        ),
        VLLM + "num_draft_tokens": ("Tokens that were proposed.", counts.num_draft_tokens),
        VLLM + "num_accepted_tokens": (
            "Proposed tokens that the model sampled, too.",
            counts.num_accepted_tokens,
        ),
        OWN + "seconds": (
            "What verifications took, by the cost model; each of a step's requests counts.",
            counts.seconds,
        ),
        OWN + "plain_seconds": (
            "What plain decoding would have taken for their tokens, by the cost model.",
            counts.plain_seconds,
        ),
    }
    for name, (text, total) in totals.items():
        counter = CounterMetricFamily(name, text, labels=names)
        counter.add_metric(values, total)
        yield counter
    by_position = {
        VLLM + "num_accepted_tokens_per_pos": ("Accepted tokens by position.", counts.accepted),
        OWN + "num_draft_tokens_per_pos": ("Proposed tokens by position.", counts.proposed),
    }
    for name, (text, numbers) in by_position.items():
        counter = CounterMetricFamily(name, text, labels=[*names, "position"])
        for position, number in enumerate(_padded(numbers, num_positions)):
            counter.add_metric([*values, str(position)], number)
        yield counter


def snapshot(counts: DraftCounts) -> DraftCounts:
    """A copy, for a thread that is not the one that counts."""
    accepted = [*counts.accepted]
    proposed = [*counts.proposed]  # copied later, so it is never the shorter one
    return DraftCounts(
        counts.num_verifications,
        proposed,
        _padded(accepted, len(proposed)),
        counts.seconds,
        counts.plain_seconds,
        counts.num_reached,
    )


def difference(now: DraftCounts, before: DraftCounts) -> DraftCounts:
    """What was counted between two snapshots of the same counts."""

    def by_position(now: Sequence[int], before: Sequence[int]) -> list[int]:
        return [one - other for one, other in zip(now, _padded(before, len(now)), strict=True)]

    return DraftCounts(
        now.num_verifications - before.num_verifications,
        by_position(now.proposed, before.proposed),
        by_position(now.accepted, before.accepted),
        now.seconds - before.seconds,
        now.plain_seconds - before.plain_seconds,
        now.num_reached - before.num_reached,
    )


def describe(counts: DraftCounts) -> str:
    """How speculation fared, for the log line."""
    if counts.acceptance_rate is None:
        return "drafts: none"
    positions = ", ".join(
        f"{yes / all_:.0%}" if all_ else "-"
        for yes, all_ in zip(counts.accepted, counts.proposed, strict=True)
    )
    speedup = "" if counts.speedup is None else f", speed-up {counts.speedup:.2f}"
    return (
        f"drafts: {counts.acceptance_rate:.1%} accepted (by position {positions}), "
        f"{counts.mean_accepted_length:.2f} tokens a verification{speedup}"
    )


def _padded(numbers: Sequence[int], length: int) -> list[int]:
    return [*numbers, *[0] * (length - len(numbers))]
