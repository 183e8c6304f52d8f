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
STARTUP = {"benchmark": "startup", "ratio": 1.25, "runs": {"bare": [1.0]}, "torch_imported": False}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "sorting.json").write_text(json.dumps(RESULT))
    (tmp_path / "startup.json").write_text(json.dumps(STARTUP))
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
