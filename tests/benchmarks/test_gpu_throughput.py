"""The GPU benchmarks' code end to end on a CPU, on a tiny model: figures without meaning."""

import json
from pathlib import Path
from typing import Any

import gpu_throughput
import gpu_workloads
import pytest
from gpu_reference import Reference
from limits import Card


@pytest.fixture(autouse=True)
def _known_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_throughput, "measure_card", lambda device: Card("H200", 1e9, 1e9))
    monkeypatch.setattr(gpu_throughput, "WARM_BATCHES", (1,))


def run(folder: Path, *options: object) -> dict[str, Any]:
    output = folder / "result.json"
    shared = ["--model", folder, "--threads", 1, "--output", output, "--dtype", "float32"]
    shared += ["--device", "cpu"]
    shared += ["--engine", "max_model_len=256", "--repeats", 1]
    gpu_throughput.main([str(option) for option in [*shared, *options]])
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def test_all_workloads(tiny_config: Path) -> None:
    result = run(tiny_config, "--shrink", 64, "--first-tokens", 2)
    rows = {row["workload"]: row for row in result["rows"]}
    assert list(rows) == [
        *("batch 1", "batch 1, decode", "batch 8", "batch 32", "batch 128", "prefill"),
        *("context 3800", "context 3800, decode", "mixed 256"),
        *("first token, cold", "first token, cached"),
        *("concurrency 1", "concurrency 2", "concurrency 4", "concurrency 8"),
    ]
    assert {row["unit"] for row in rows.values()} == {"tok/s", "ms"}
    for name, row in rows.items():
        (seconds, *_) = result["samples"]["seconds"][name]
        limit = result["samples"]["limit seconds"][name]
        assert row["mini-infer"] > 0
        assert row["bar"] is None, "a shrunk run meets no bar"
        if not name.startswith("first token"):
            assert row["of limit"] == pytest.approx(limit / seconds)
            assert row["mini-infer"] / row["card's limit"] == pytest.approx(row["of limit"])
    assert len(result["samples"]["seconds"]["first token, cold"]) == 2
    assert rows["batch 1, decode"]["out"] == rows["batch 1"]["out"] - 1
    limits = result["samples"]["limit seconds"]
    assert 0 < limits["context 3800, decode"] < limits["context 3800"]
    assert rows["batch 8"]["Hugging Face"] > 0
    assert rows["batch 128"]["Hugging Face"] is None
    fall, gain, waste = result["bars"]
    cold, cached = (rows[f"first token, {kind}"]["mini-infer"] for kind in ("cold", "cached"))
    assert fall["value"] == pytest.approx(100 * (1 - cached / cold))
    assert gain["value"] == pytest.approx(
        rows["concurrency 8"]["mini-infer"] / rows["concurrency 1"]["mini-infer"]
    )
    assert 0 <= waste["value"] < 100
    assert waste["at_most"] == 4
    assert result["setup"]["lengths"] == {"divided_by": 64}


def test_bars_and_peers_of_a_model_that_has_them(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(
        bars={"context 3800": 1e9, "batch 1": 5}, peers={"other": {"context 3800": 7.0}}
    )
    monkeypatch.setitem(gpu_throughput.REFERENCES, "tiny", reference)
    monkeypatch.setattr(gpu_workloads, "BATCHES", {"context 3800": (1, 9, 3)})
    result = run(tiny_config, "--workloads", "context 3800", "--no-hugging-face")
    row, decode = result["rows"]
    assert decode["bar"] is None
    assert (row["bar"], row["other"], row["in"], row["out"]) == (1e9, 7.0, 9, 3)
    assert [(bar["name"], bar["met"]) for bar in result["bars"][:2]] == [
        ("context 3800, tok/s", False),
        ("batch 1, tok/s", None),
    ]


def test_out_of_time(tiny_config: Path) -> None:
    options = ["--budget", 0, "--no-hugging-face", "--shrink", 64]
    result = run(tiny_config, "--workloads", "prefill", *options)
    assert result["rows"] == []
    assert result["notes"] == ["prefill, repeat 1: not run, no time was left"]


def test_traces(tiny_config: Path) -> None:
    traces = tiny_config / "traces"
    names = ["batch 1", "prefill", "first token", "mixed 256", "concurrency"]
    options = ["--profile", traces, "--profile-skip", 1, "--profile-steps", 1, "--shrink", 64]
    run(tiny_config, "--no-hugging-face", "--workloads", *names, *options)
    written = {path.name for path in traces.iterdir()}
    assert {f"{name.replace(' ', '-')}.json.gz" for name in names} - written == set()
