"""On a CPU there are no graphs: that the four engines run, and the arithmetic of the table."""

import json
from pathlib import Path

import cuda_graphs
import pytest
from limits import Card


def test_four_engines_one_table(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "measure_card", lambda device: Card("H200", 1e9, 1e9))
    output = tmp_path / "result.json"
    options = ["--shrink", "32", "--repeats", "2", "--dtype", "float32", "--threads", "1"]
    options += ["--device", "cpu"]
    options += ["--engine", "max_model_len=64", "--output", str(output)]
    cuda_graphs.main(["--model", str(tiny_config), *options])
    result = json.loads(output.read_text())
    rows = {(row["launched"], row["depth"]): row for row in result["rows"]}
    assert set(rows) == {("eager", 1), ("eager", 2), ("graph", 1), ("graph", 2)}
    for row in rows.values():
        assert row["ms a token"] * row["tok/s"] == pytest.approx(1000)
        ratio = row["ms a token"] / rows["eager", 1]["ms a token"]
        assert row["of eager, depth 1"] == pytest.approx(ratio)
    (bar,) = result["bars"]
    assert bar["value"] == pytest.approx(100 * (1 - rows["graph", 2]["of eager, depth 1"]))
    assert [len(times) for times in result["samples"].values()] == [2] * 4
    assert result["setup"]["lengths"] == {"prompt_tokens": 4, "output_tokens": 8}
