"""What the doctor found, as a table to read and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["info", "ok", "warn", "fail"]
MARKS: dict[Status, str] = {"info": "", "ok": "ok", "warn": "warn", "fail": "FAIL"}
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    section: str
    name: str
    value: str
    status: Status = "info"
    hint: str | None = None
    """What to do about it."""


def is_well(findings: Sequence[Finding]) -> bool:
    """Does all that was asked for work?"""
    return all(finding.status != "fail" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """A table with a heading for each section; hints stand below what they are about."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines: list[str] = []
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        lines.append(f"  {MARKS[finding.status]:4}  {finding.name:{width}}  {finding.value}")
        if finding.hint is not None:
            lines.append(f"  {'':4}  {'':{width}}  -> {finding.hint}")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding], details: dict[str, Any]) -> str:
    """``ok``, ``findings``, and the numbers behind them."""
    found = [asdict(finding) for finding in findings]
    return json.dumps({"ok": is_well(findings), "findings": found, **details}, indent=2)


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / GIB:.1f} GiB"
