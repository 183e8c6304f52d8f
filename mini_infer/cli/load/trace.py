"""Recorded traffic: when requests came, how long they were, and which prefixes they shared.

Reads Mooncake's traces (FAST 2025; JSON lines) and Azure's (CSV), both also compressed. A prompt's
text is invented; where a trace says which blocks of a prompt are equal, they get equal texts.
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mini_infer.cli.load.run import Job
from mini_infer.cli.load.workload import Words, not_empty, read_lines
from mini_infer.core.errors import InvalidConfigError

BLOCK_TOKENS = 512
"""Of a prompt, per element of Mooncake's ``hash_ids``."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace; ``arrival`` is in seconds."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Sequence[int] = ()

    def prompt(self, words: Words, shrink: float, seed: int) -> str:
        """An invented text of ``1 / shrink`` of the length."""
        rest = self.num_prompt_tokens
        parts = []
        for block_id in self.block_ids:
            length = min(BLOCK_TOKENS, rest)
            parts.append(words.text(random.Random(block_id), _shrunk(length, shrink)))
            rest -= length
        if rest > 0:
            parts.append(words.text(random.Random(f"{seed} {self}"), _shrunk(rest, shrink)))
        return " ".join(parts)


def trace_jobs(
    path: Path, words: Words, num: int, *, speed: float = 1.0, shrink: float = 1.0, seed: int = 0
) -> list[Job]:
    """The first ``num`` requests, ``speed`` times as fast and ``shrink`` times as short.

    Raises:
        InvalidConfigError: the file can't be read as a trace.
    """
    if not (speed > 0 and shrink > 0):
        raise InvalidConfigError("--speed and --shrink must be above 0")
    requests = not_empty(path, read_trace(path)[:num])
    first = requests[0].arrival
    return [
        Job(
            request.prompt(words, shrink, seed),
            _shrunk(request.num_output_tokens, shrink),
            (request.arrival - first) / speed,
        )
        for request in requests
    ]


def read_trace(path: Path) -> list[TracedRequest]:
    """All requests of a trace in the order of their arrival.

    Raises:
        InvalidConfigError: it can't be read, or is in neither format.
    """
    lines = read_lines(path)
    is_json = bool(lines) and lines[0].lstrip().startswith("{")
    try:
        requests = list(_mooncake(lines) if is_json else _azure(lines))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfigError(
            f"{path} is no trace of Mooncake's (JSON lines with timestamp, input_length, "
            f"output_length) or Azure's (CSV with TIMESTAMP, ContextTokens, GeneratedTokens): "
            f"{type(error).__name__}: {error}"
        ) from None
    return sorted(requests, key=lambda request: request.arrival)


def _mooncake(lines: Sequence[str]) -> Iterator[TracedRequest]:
    for line in lines:
        item = json.loads(line)
        yield TracedRequest(
            float(item["timestamp"]) / 1e3,
            int(item["input_length"]),
            int(item["output_length"]),
            tuple(item.get("hash_ids", ())),
        )


def _azure(lines: Sequence[str]) -> Iterator[TracedRequest]:
    for row in csv.DictReader(lines):
        # Seven decimals, of which Python reads six.
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield TracedRequest(
            (moment - datetime(1970, 1, 1)).total_seconds(),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )


def _shrunk(length: int, shrink: float) -> int:
    return max(1, round(length / shrink))
