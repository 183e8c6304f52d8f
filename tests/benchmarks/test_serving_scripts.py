"""The benchmarks that start servers, on the dry run: they work, and so does their JSON."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import serving_fairness
import serving_load
import serving_overhead
import soak

pytestmark = pytest.mark.processes

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script's ``main`` in this process and returns its JSON."""

    def run(script: Any, *options: object) -> dict[str, Any]:
        output = tmp_path / "result.json"
        shared = ["--quick", "--dry-run", "--output", output]
        script.main([str(option) for option in [*shared, *options]])
        result: dict[str, Any] = json.loads(output.read_text())
        assert result["benchmark"] == script.__name__
        assert (result["setup"]["model"], result["setup"]["weights"]) == ("dry run", "no")
        return result

    return run


def test_serving_load(run: Run) -> None:
    result = run(serving_load, "--streams", 5, "--tokens", 7)
    rows = {row["server"]: row for row in result["rows"]}
    assert list(rows) == ["mini-infer dry run", "bare FastAPI", "bare, an answer at once"]
    ours, bare, _ = rows.values()
    assert ours["bytes a chunk"] == pytest.approx(bare["bytes a chunk"], abs=1)
    assert ours["server MiB"] > 20
    assert ours["CPU us a token"] >= 0  # counted in ticks of 10 ms
    ratio, errors = result["bars"]
    assert ratio["value"] == pytest.approx(ours["tok/s"] / bare["tok/s"])
    assert (errors["value"], errors["met"]) == (0, True)


def test_serving_overhead(run: Run) -> None:
    result = run(serving_overhead, "--streams", 3, "--output-tokens", 5)
    offline, http = result["rows"]
    assert result["bars"][0]["value"] == pytest.approx(
        http["output tok/s"] / offline["output tok/s"]
    )
    assert result["notes"] == ["identical texts: 3 of 3"]


def test_serving_fairness(run: Run) -> None:
    result = run(serving_fairness, "--requests", 5, "--rate", 200)
    alone, flooded = result["rows"]
    assert alone["long prompts answered a second"] == 0
    assert result["bars"][0]["value"] == pytest.approx(
        flooded["p99 TTFT ms"] / alone["p99 TTFT ms"]
    )


def test_soak(run: Run) -> None:
    result = run(soak, "--minutes", 0.02, "--max-model-len", 4096)
    unanswered, _, blocks, all_blocks = result["bars"]
    assert (unanswered["value"], blocks["value"], all_blocks["value"]) == (0, 0, 1)
    counts = {row["outcome"]: row["requests"] for row in result["rows"]}
    assert counts.pop("all") == sum(counts.values()) > 10
    assert not any("FAULT" in note for note in result["notes"])


def test_a_soaks_answers_are_compared() -> None:
    chat = {"index": 1, "message": {"content": "b"}}
    assert soak.texts_of({"choices": [chat, {"index": 0, "text": "a"}]}) == ("a", "b")
    events = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "x"}}]},
        {"choices": [{"index": 0, "delta": {}}]},
    ]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    assert soak.streamed_texts(f"{lines}data: [DONE]\n\n".encode()) == ("x",)
    assert soak.streamed_texts(lines.encode()) == (), "it was cut off"


def test_growth_of_memory_is_that_after_warm_up() -> None:
    samples = [10, 50, 90, 100, 100, 100, 101, 101, 101, 103, 103, 103]
    assert soak.memory_before_and_after(samples) == (100, 103)


def test_a_fault_is_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    tally = soak.Tally()
    tally.fault("it broke")
    assert (tally.faults, tally.outcomes) == (["it broke"], Counter())
    assert "FAULT: it broke" in capsys.readouterr().err
