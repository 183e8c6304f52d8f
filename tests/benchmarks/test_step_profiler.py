from collections.abc import Iterator
from pathlib import Path

import prefix_cache
import pytest
from harness import make_parser, parse, trace
from kernel_trace import Trace
from step_profiler import StepProfiler

from mini_infer import LLM, SamplingParams
from mini_infer.modeling import profiling


@pytest.fixture
def llm(tiny_config: Path) -> Iterator[LLM]:
    with LLM(str(tiny_config), load_format="dummy", dtype="float32", max_model_len=64) as engine:
        yield engine


def generate(llm: LLM, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    llm.generate([[1, 2, 3]], params, use_tqdm=False)


def test_a_trace_holds_the_steps_after_those_skipped_and_their_layers(
    llm: LLM, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "trace.json.gz"
    with StepProfiler(llm, path, skip=2, steps=3):
        generate(llm, 8)
    recorded = Trace.load(path)
    assert recorded.steps == [f"step {number}: 1 requests, 1 tokens" for number in (2, 3, 4)]
    assert recorded.num_layers == 2
    layers = [
        event["name"]
        for event in sorted(recorded.events, key=lambda event: event["ts"])
        if event.get("cat") == "user_annotation" and event["name"].startswith("layer")
    ]
    assert layers == ["layer 0", "layer 1"] * 3
    assert profiling.layer_range(0) is profiling.layer_range(1), "off again"


def test_a_trace_from_the_first_step(llm: LLM, tmp_path: Path) -> None:
    with StepProfiler(llm, tmp_path / "trace.json", skip=0, steps=1):
        generate(llm, 3)
    assert Trace.load(tmp_path / "trace.json").steps == ["step 0: 1 requests, 3 tokens"]


def test_a_trace_ends_with_the_work(llm: LLM, tmp_path: Path) -> None:
    with StepProfiler(llm, tmp_path / "trace.json", skip=1, steps=100):
        generate(llm, 3)
    assert len(Trace.load(tmp_path / "trace.json").steps) == 2


def test_too_few_steps_are_told(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StepProfiler(llm, tmp_path / "trace.json", skip=9, steps=1):
        generate(llm, 3)
    assert "no trace: 3 steps ran, 9 of them are skipped" in capsys.readouterr().out
    assert not (tmp_path / "trace.json").exists()


def test_names_become_file_names(llm: LLM, tmp_path: Path) -> None:
    typed = ["--profile", str(tmp_path), "--profile-skip", "0", "--threads", "1"]
    with trace(parse(make_parser("Doc."), typed), llm, "first token, cold"):
        generate(llm, 1)
    assert (tmp_path / "first-token-cold.json.gz").exists()


def test_every_engine_of_a_script_is_traced(tiny_config: Path, tmp_path: Path) -> None:
    options = ["--model", str(tiny_config), "--load-format", "dummy", "--threads", "1", "--quick"]
    options += ["--shared", "32", "--unique", "4", "--dtype", "float32"]
    prefix_cache.main([*options, "--profile", str(tmp_path), "--profile-skip", "1"])
    traces = list(tmp_path.glob("engine-*.json.gz"))
    assert len(traces) == 2
    assert all(Trace.load(path).steps for path in traces)


def test_nvtx_ranges_are_turned_on(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr("torch.cuda.nvtx.range_push", names.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: None)
    options = ["--model", str(tiny_config), "--load-format", "dummy", "--threads", "1", "--quick"]
    try:
        prefix_cache.main([*options, "--shared", "32", "--unique", "4", "--nvtx"])
    finally:
        profiling.disable_ranges()
    assert {"layer 0", "layer 1"} <= set(names)


def test_profile_and_nvtx_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(make_parser("Doc."), ["--profile", "folder", "--nvtx"])
    assert "not allowed with" in capsys.readouterr().err
