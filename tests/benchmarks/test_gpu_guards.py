"""Benchmarks of a GPU where there is none: one clear line, exit code 2."""

import importlib
from pathlib import Path

import pytest
import trace_summary
from harness import require_gpu, run
from suite import GPU_BENCHMARKS

from mini_infer.core.errors import InvalidConfigError


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("name", GPU_BENCHMARKS)
def test_a_gpu_benchmark_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ("gpu_kernels", "gpu_products"):
        pytest.importorskip("triton")
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: script.main([]))
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: this benchmark measures a GPU, and torch sees none")


def test_who_asks_for_a_cpu_gets_it() -> None:
    require_gpu("cpu")
    with pytest.raises(InvalidConfigError, match="--device cpu --quick shows only that it works"):
        require_gpu("auto")


@pytest.mark.parametrize("content", [None, b"no json", b"\x1f\x8b broken"])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as exit_info:
        trace_summary.main([str(tmp_path / name)])
    assert exit_info.value.code == 2
    assert "is no trace that can be read" in capsys.readouterr().err
