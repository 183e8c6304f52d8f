"""The benchmark of the host's share of a step: it runs the real engine over no model."""

import json
from pathlib import Path
from typing import Any

import host_overhead
import pytest


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    output = tmp_path / "result.json"
    options = ["--batches", "1", "3", "--prompt-tokens", "8", "--output-tokens", "6"]
    options += ["--mixed", "2", "--first-tokens", "2", "--repeats", "1", "--threads", "1"]
    options += ["--output", str(output)]
    host_overhead.main(options)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_every_workload_is_measured_whole_and_streamed(result: dict[str, Any]) -> None:
    rows = [(row["workload"], row["answers"]) for row in result["rows"][:-2]]
    workloads = ["batch 1", "batch 3", "mixed 2"]
    assert rows == [(name, how) for name in workloads for how in ("whole", "streamed")]
    assert set(result["samples"]) == {f"{name}, {how}" for name, how in rows}
    assert result["setup"]["weights"] == "none"


def test_the_parts_add_up_to_the_timed_step(result: dict[str, Any]) -> None:
    for row in result["rows"][:-2]:
        parts = [row[f"{part} us"] for part in ("schedule", "update", "output", "other")]
        assert min(parts) > 0
        assert row["longest step ms"] * 1000 >= row["median step us"] > 0
    whole, streamed = result["rows"][:2]
    assert whole["steps"] == streamed["steps"] == 6


def test_first_tokens_are_timed_before_and_behind_their_launch(result: dict[str, Any]) -> None:
    cold, cached = result["rows"][-2:]
    assert [cold["workload"], cached["workload"]] == ["first token, cold", "first token, cached"]
    for row in (cold, cached):
        before, behind = row["before its launch us"], row["behind it us"]
        assert min(before, behind) > 0
        assert row["step us"] == pytest.approx(before + behind)  # medians of two
