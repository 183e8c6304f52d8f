"""A run's figures as a table for people and as JSON for programs."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mini_infer import __version__
from mini_infer.cli.load.client import Record
from mini_infer.cli.load.figures import NAMES, Objective
from mini_infer.cli.load.run import Job

COLUMNS = ("mean", "median", "p90", "p99", "max")
COUNTS = (
    ("completed", "requests answered", "d"),
    ("failed", "requests failed", "d"),
    ("seconds", "duration, s", ".2f"),
    ("prompt_tokens", "prompt tokens", "d"),
    ("output_tokens", "output tokens", "d"),
    ("requests_per_second", "requests/s", ".2f"),
    ("output_tokens_per_second", "output tokens/s", ".1f"),
    ("total_tokens_per_second", "prompt and output tokens/s", ".1f"),
    ("peak_concurrency", "most requests at a time", "d"),
    ("good_requests", "requests within the objectives", "d"),
    ("goodput", "goodput, requests/s", ".2f"),
)


def print_figures(found: Mapping[str, Any], objectives: Sequence[Objective]) -> None:
    """Writes the table to standard output, and what went wrong to standard error."""
    for key, name, form in COUNTS:
        if key in found:
            click.echo(f"{name:<32}{found[key]:>12{form}}")
    click.echo(f"\n{'milliseconds':<26}" + "".join(f"{name:>10}" for name in COLUMNS))
    bounds = {item.metric: item.milliseconds for item in objectives}
    for metric, name in NAMES.items():
        summary = found[f"{metric}_ms"]
        cells = [f"{summary[column]:>10.2f}" if summary else f"{'-':>10}" for column in COLUMNS]
        bound = f"   objective: {bounds[metric]:g}" if metric in bounds else ""
        click.echo(f"{name + ', ' + metric.upper():<26}" + "".join(cells) + bound)
    for message, count in found["errors"].items():
        click.echo(f"{count} failed: {message}", err=True)


def to_json(
    settings: Mapping[str, Any],
    jobs: Sequence[Job],
    records: Sequence[Record],
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """Settings, figures and every request; of its times, ``start`` is from the first one's."""
    first = min((record.start for record in records), default=0.0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "mini-infer": __version__,
        "settings": {
            # Never the key. JSON has no infinity.
            name: str(value) if isinstance(value, Path) or value == float("inf") else value
            for name, value in settings.items()
            if name != "api_key"
        },
        "figures": dict(found),
        "requests": [
            {
                "start": record.start - first,
                "asked_output_tokens": job.num_output_tokens,
                "prompt_tokens": record.num_prompt_tokens,
                "output_tokens": record.num_output_tokens,
                "ttft": record.ttft,
                "tpot": record.tpot,
                "e2el": record.latency,
                "finish_reason": record.finish_reason,
                "error": record.error,
            }
            for job, record in zip(jobs, records, strict=True)
        ],
    }
