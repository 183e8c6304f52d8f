import json
from pathlib import Path
from typing import Any

import pytest
import trace_summary
from kernel_trace import NUM_LAYERS, Layers, Trace, find_layers, name_layers


def kernel(name: str, start: float, duration: float, launch: int = 1) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": start,
        "dur": duration,
        "args": {"grid": [4, 1, 1], "correlation": launch},
    }


def step(number: int, start: float) -> dict[str, Any]:
    name = f"step {number}: 1 requests, 1 tokens"
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": 1, "tid": 1}


def operator(name: str, start: float, duration: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "tid": thread}


def replay(start: float, launch: int) -> list[dict[str, Any]]:
    """An embedding, three layers of two kernels that overlap by 1, and a head after a gap of 5."""
    events = [kernel("embed", start, 10, launch)]
    for layer in range(3):
        at = start + 10 + 15 * layer
        events += [kernel("attend", at, 6, launch), kernel("mlp", at + 5, 10, launch)]
    return [*events, kernel("head", start + 60, 20, launch)]


def write(path: Path, events: list[dict[str, Any]], layers: int = 3) -> Path:
    Trace({"traceEvents": events, NUM_LAYERS: layers}).save(path)
    return path


def test_what_kernels_add_sums_to_the_time_from_first_to_last() -> None:
    kernels = Trace({"traceEvents": [*replay(100, 1)]}).kernels()
    assert [item.name for item in kernels[:3]] == ["embed", "attend", "mlp"]
    assert [item.added for item in kernels[:4]] == [10, 6, 9, 6]
    assert [item.idle for item in kernels] == [0] * 7 + [5]
    assert sum(item.added for item in kernels) == 80


def test_a_kernel_inside_another_adds_nothing() -> None:
    kernels = Trace({"traceEvents": [kernel("long", 0, 10), kernel("short", 2, 3)]}).kernels()
    assert [item.added for item in kernels] == [10, 0]


@pytest.mark.parametrize(
    ("names", "count", "expected"),
    [
        ("eababab", 3, Layers(1, 2, 3)),
        ("eabababh", 3, Layers(1, 2, 3)),
        ("aabaabaab", 3, Layers(0, 3, 3)),
        ("eaaah", 3, Layers(1, 1, 3)),
        ("eababh", 3, None),
        ("abc", 1, None),
        ("", 2, None),
    ],
)
def test_layers_are_what_repeats(names: str, count: int, expected: Layers | None) -> None:
    assert find_layers(names, count) == expected


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_layers_of_replayed_graphs_get_ranges(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [*replay(0, 1), *replay(100, 2)])
    name_layers(path)
    added = [event for event in Trace.load(path).events if event["cat"] == "gpu_user_annotation"]
    assert [event["name"] for event in added] == ["layer 0", "layer 1", "layer 2"] * 2
    assert [(event["ts"], event["dur"]) for event in added[:2]] == [(10, 15), (25, 15)]


def test_a_trace_without_graphs_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", [kernel("a", 0, 1, 1), kernel("a", 1, 1, 2)])
    before = path.read_bytes()
    name_layers(path)
    assert path.read_bytes() == before


def test_summary_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [step(4, 0), *replay(0, 1), step(5, 100), *replay(100, 2)]
    trace_summary.main([str(write(tmp_path / "trace.json", events))])
    text = capsys.readouterr().out
    assert "2 steps (step 4: 1 requests, 1 tokens ... step 5" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    # grid, launches a step, us a step
    assert "90.0 us a step, 8 kernels" in text, "the gap between the replays counts"
    assert "2 graph replays of 8 kernels, 80.0 us each" in text
    assert lines["mlp"][1:] == ["4", "9", "27.0", "0"], "of a layer: each, a step, idle before"
    assert lines["embed"][:3] == ["embed", "4", "1"], "around the layers"


def test_summary_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        operator("outer", 0, 10),
        operator("inner", 2, 3),
        operator("deepest", 3, 1),
        operator("inner", 6, 2),
        operator("later", 10, 5),
        operator("outer", 0, 5, thread=2),
    ]
    times = Trace({"traceEvents": events}).operators()
    assert times == {"outer": [5, 5], "inner": [2, 2], "deepest": [1], "later": [5]}
    trace_summary.main([str(write(tmp_path / "trace.json", events)), "--top", "2"])
    text = capsys.readouterr().out
    assert "1 steps on a CPU" in text
    assert "later" in text
    assert "deepest" not in text


def test_names_of_templates_are_short() -> None:
    long = "void at::native::elementwise_kernel<128, 4, at::native::FillFunctor<" + "x" * 100
    assert trace_summary._short(long).startswith("elementwise_kernel<128, 4, FillFunctor<xxx")
    assert len(trace_summary._short(long)) == trace_summary.NAME_WIDTH


def test_a_saved_trace_is_json(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", [kernel("a", 0, 1)])
    assert json.loads(path.read_text())["traceEvents"][0]["name"] == "a"
