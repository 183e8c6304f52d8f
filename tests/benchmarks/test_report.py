import json
from pathlib import Path

import pytest
import report

RESULT = {
    "benchmark": "sorting",
    "summary": "how fast",
    "setup": {
        "model": "m",
        "weights": "random",
        "dtype": "float16",
        "lengths": {"prompt_tokens": 5},
        "prefix cache": "off",
        "machine": {"processor": "P", "cores": 2},
        "versions": {"torch": "2.0"},
        "repeats": 3,
        "quick": True,
    },
    "rows": [{"case": "on", "tok/s": 12.345}, {"case": "off", "tok/s": None}],
    "bars": [{"name": "gain", "value": 2.34, "at_least": 2.0, "met": True}],
    "notes": ["llama.cpp: skipped"],
}
ON_GPU = RESULT | {
    "benchmark": "gpu_throughput",
    "setup": RESULT["setup"]  # type: ignore[operator]
    | {"machine": {"gpu": "G", "cores": 3}, "card": {"read TB/s": 4.5}},
    "rows": [{"workload": "batch 1", "of limit": 0.91234, "other engine": 207.6}],
    "bars": [{"name": "waste", "value": 1.5, "at_least": None, "at_most": 4.0, "met": True}],
}
KERNELS = {"benchmark": "gpu_kernels", "gpu": "G", "tables": {"decode": [{"us": 8.5}]}}
STARTUP = {"benchmark": "startup", "ratio": 1.25, "runs": {"bare": [1.0]}, "torch_imported": False}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "sorting.json").write_text(json.dumps(RESULT))
    (tmp_path / "startup.json").write_text(json.dumps(STARTUP))
    (tmp_path / "gpu_throughput-model.json").write_text(json.dumps(ON_GPU))
    (tmp_path / "gpu_kernels.json").write_text(json.dumps(KERNELS))
    return tmp_path


def test_every_result_is_rendered(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["--results", str(results)])
    text = capsys.readouterr().out
    assert "| case | tok/s |\n| --- | --- |\n| on | 12.3 |\n| off | - |" in text
    assert "- gain: 2.34 (bar: at least 2, met)" in text
    assert "- llama.cpp: skipped" in text
    assert "prompt tokens 5; prefix cache off; P, 2 cores; torch 2.0; medians of 3" in text
    assert "QUICK RUN, not a result" in text
    assert "### startup\n\n| ratio | torch_imported |\n| --- | --- |\n| 1.25 | False |" in text


def test_results_of_a_gpu_come_last(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["--results", str(results)])
    cpu, gpu = capsys.readouterr().out.split("## On a GPU")
    assert "## On a CPU\n\n### sorting" in cpu
    assert "### startup" in cpu
    assert "### gpu_throughput-model" in gpu
    assert "G, 3 cores; the card's limits in the same run: read TB/s 4.5; torch 2.0" in gpu
    assert "| workload | of limit | other engine |" in gpu
    assert "| batch 1 | 0.912 | 207.6 |" in gpu
    assert "- waste: 1.5 (bar: at most 4, met)" in gpu
    assert "| gpu |\n| --- |\n| G |\n\n| us |\n| --- |\n| 8.5 |" in gpu


def test_the_marked_part_of_a_document_is_replaced(results: Path, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        report.main(["--results", str(results), "--into", str(document)])
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("### sorting") == 1


def test_a_document_without_marks_is_left_alone(results: Path, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("text")
    with pytest.raises(SystemExit, match="has no lines"):
        report.main(["--results", str(results), "--into", str(document)])
    assert document.read_text() == "text"


def test_no_results(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no results"):
        report.main(["--results", str(tmp_path)])
