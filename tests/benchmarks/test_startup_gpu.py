"""The report over starts that a fake makes; a real one needs a GPU."""

import json
from pathlib import Path
from typing import Any

import harness
import pytest
import startup_gpu


@pytest.mark.parametrize("repeats", [1, 3])
def test_phases_are_medians_of_cold_and_warm_starts(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    folders: list[str] = []

    def fake(model: str, options: dict[str, Any], compiled: str) -> dict[str, Any]:
        assert (model, options["load_format"]) == (str(model_folder), "dummy")
        first = compiled not in folders
        folders.append(compiled)
        seconds = {"import torch": 1.0, "weights": 10.0 if first else 1.0}
        return {
            "seconds": seconds,
            "ready": sum(seconds.values()),
            "peak_host_gib": 0.5,
            "peak_gpu_gib": 2.0,
            "kernels": 7,
        }

    monkeypatch.setattr(startup_gpu, "start_process", fake)
    monkeypatch.setattr(harness, "require_gpu", lambda: None)
    output = tmp_path / "result.json"
    options = ["--model", model_folder, "--load-format", "dummy", "--threads", 1]
    options += ["--repeats", repeats, "--output", output, "--limit", 10]
    startup_gpu.main([str(option) for option in options])
    assert len(folders) == 2 * len(set(folders)) == 2 * repeats
    result = json.loads(output.read_text())
    rows = {row["phase"]: row for row in result["rows"]}
    assert (rows["weights"]["cold"], rows["weights"]["warm"]) == (10.0, 1.0)
    assert rows["ready for requests (s)"]["cold"] == 11.0
    assert result["bars"][0]["met"] is False


def test_a_start_is_a_process_with_its_own_folder_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "kernel = pathlib.Path(os.environ['TRITON_CACHE_DIR'], 'hash', 'kernel.cubin')\n"
        "kernel.parent.mkdir()\n"
        "kernel.touch()\n"
        "print('a word before')\n"
        "print(json.dumps({'given': json.loads(sys.argv[2])[:2]}))\n"
    )
    monkeypatch.setattr(startup_gpu, "__file__", str(script))
    result = startup_gpu.start_process("m", {"seed": 0}, str(tmp_path))
    assert result == {"given": ["m", {"seed": 0}], "kernels": 1}


def test_a_start_that_fails_ends_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(startup_gpu, "__file__", str(script))
    with pytest.raises(SystemExit, match="did not start"):
        startup_gpu.start_process("m", {}, str(tmp_path))
