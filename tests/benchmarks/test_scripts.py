"""Every script end to end on a tiny model: it runs, and its JSON holds what it claims."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chunked_prefill
import continuous_batching
import dtype_agreement
import executors
import pipeline_parallel
import prefix_cache
import pytest
import structured_output
import suite
import tensor_parallel
import vs_huggingface
from client import Job, serve
from peer_hugging_face import HuggingFace

from mini_infer import LLM
from mini_infer.cli.bench import FOLDER, benchmarks
from mini_infer.core.errors import ModelNotFoundError

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(model_folder: Path, tmp_path: Path) -> Run:
    """Runs a script's ``main`` in this process and returns its JSON."""

    def run(script: Any, *options: object) -> dict[str, Any]:
        output = tmp_path / "result.json"
        shared = ["--model", model_folder, "--threads", 1, "--quick", "--output", output]
        script.main([str(option) for option in [*shared, *options]])
        result: dict[str, Any] = json.loads(output.read_text())
        assert result["benchmark"] == script.__name__
        assert result["setup"]["weights"] == "real (safetensors)"
        return result

    return run


def test_continuous_batching(run: Run) -> None:
    options = ["--requests", 9, "--prompt-tokens", 2, 5, "--output-tokens", 1, 6]
    result = run(continuous_batching, "--concurrency", 1, 8, *options)
    assert [row["concurrency"] for row in result["rows"]] == [1, 8]
    assert all(row["static tok/s"] > 0 for row in result["rows"])
    assert set(result["samples"]) == {"static 1", "continuous 1", "static 8", "continuous 8"}
    scaling = result["rows"][1]["continuous tok/s"] / result["rows"][0]["continuous tok/s"]
    assert result["bars"][0]["value"] == pytest.approx(scaling)


def test_continuous_batching_without_the_bars_concurrencies(run: Run) -> None:
    result = run(continuous_batching, "--concurrency", 2, "--requests", 2, "--output-tokens", 1, 2)
    assert result["bars"][0]["met"] is None


def test_chunked_prefill(run: Run) -> None:
    options = ["--long-prompt", 200, "--running", 2, "--prompt-tokens", 4, "--chunk", 32]
    result = run(chunked_prefill, *options)
    off, on = result["rows"]
    assert (off["chunked prefill"], on["chunked prefill"]) == ("off", "on")
    assert result["setup"]["engine"]["max_num_batched_tokens"] == 32
    assert [len(result["samples"][name]) for name in ("off", "on")] == [1, 1]
    assert on["peak ITL ms"] >= on["p99 ITL ms"] >= on["median ITL ms"] > 0
    fall = 100 * (1 - on["peak ITL ms"] / off["peak ITL ms"])
    assert result["bars"][0]["value"] == pytest.approx(fall)


def test_chunked_prefill_with_several_chunk_sizes_and_prompts(run: Run) -> None:
    options = ["--long-prompt", 120, "--long-prompts", 2, "--running", 2, "--prompt-tokens", 4]
    options += ["--output-tokens", 100, "--chunk", 16, 64, "--temperature", 0.6]
    result = run(chunked_prefill, *options)
    rows = {row["chunked prefill"]: row for row in result["rows"]}
    assert list(rows) == ["off", "on, 16", "on, 64"]
    peak, throughput = result["bars"]
    best = peak["name"].partition("(")[2].rstrip(")")
    falls = {
        field: 100 * (1 - rows[best][field] / rows["off"][field])
        for field in ("peak ITL ms", "output tok/s")
    }
    assert peak["value"] == pytest.approx(falls["peak ITL ms"])
    assert throughput["value"] == pytest.approx(falls["output tok/s"])
    assert (peak["at_least"], throughput["at_most"]) == (70, 5)


def test_chunked_prefill_whose_running_requests_end_too_soon(run: Run) -> None:
    with pytest.raises(SystemExit, match="raise --output-tokens"):
        run(chunked_prefill, "--long-prompt", 200, "--running", 1, "--output-tokens", 4)


def test_prefix_cache(run: Run) -> None:
    result = run(prefix_cache, "--shared", 64, "--unique", 4)
    hits = {row["prefix cache"]: row["hit tokens"] for row in result["rows"]}
    assert hits == {"off": 0, "on, first request": 0, "on, later requests": 64}
    assert result["rows"][0]["of off"] == 1.0


def test_tensor_parallel(run: Run) -> None:
    limits = ["--max-model-len", 256, "--engine", "kv_cache_memory=8MiB"]
    options = ["--sizes", 1, 2, "--workloads", "batch 1", "prefill", "--dtype", "float32"]
    result = run(tensor_parallel, *options, *limits)
    found = [(row["workload"], row["ranks"], row["same text"]) for row in result["rows"]]
    assert found == [(name, size, "1 of 1") for name in ("batch 1", "prefill") for size in (1, 2)]
    assert all(row["of 1"] > 0 for row in result["rows"])


def test_pipeline_parallel(run: Run) -> None:
    limits = ["--max-model-len", 256, "--engine", "kv_cache_memory=8MiB"]
    result = run(pipeline_parallel, "--workloads", "batch 8", "--dtype", "float32", *limits)
    found = [(row["stages"], row["same text"]) for row in result["rows"]]
    assert found == [("1", "1 of 1"), ("2, a step at a time", "1 of 1"), ("2", "1 of 1")]
    assert all(row["of 1"] > 0 for row in result["rows"])


def test_executors(run: Run) -> None:
    """Without Ray, whose cluster takes longer to start than all of this."""
    limits = ["--max-model-len", 256, "--engine", "kv_cache_memory=8MiB"]
    options = ["--executors", "local", "mp", "--stages", 1, "--workloads", "batch 1"]
    result = run(executors, *options, "--dtype", "float32", *limits)
    found = [(row["executor"], row["same text"]) for row in result["rows"]]
    assert found == [("local", "1 of 1"), ("mp", "1 of 1")]
    assert all(row["of local"] > 0 for row in result["rows"])


def test_structured_output(run: Run) -> None:
    result = run(structured_output, "--prompt-tokens", 4)
    assert [(row["batch"], row["form"]) for row in result["rows"]] == [
        (batch, form) for batch in (1, 2) for form in structured_output.FORMS
    ]
    for row in result["rows"]:
        assert row["output tok/s"] > 0
        assert (row["mask ms"] is None) == (row["form"] == "free")
    (bar,) = result["bars"]
    assert bar["value"] == result["rows"][5]["of free"]


def test_dtype_agreement_of_float32_with_itself(run: Run) -> None:
    options = ["--prompts", 3, "--output-tokens", 5, "--dtype", "float32"]
    result = run(dtype_agreement, *options)
    (row,) = result["rows"]
    assert (row["agreeing %"], row["identical outputs"]) == (100.0, 3)
    assert row["earliest difference after"] is None
    assert result["bars"][0]["met"] is True


def test_dtype_agreement_counts_up_to_the_first_difference(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = dtype_agreement._generate

    def with_a_difference(*args: Any, **options: Any) -> Any:
        outputs, setup = generate(*args, **options)
        if not options:  # not the reference
            outputs[0][2] += 1
        return outputs, setup

    monkeypatch.setattr(dtype_agreement, "_generate", with_a_difference)
    options = ["--prompts", 1, "--output-tokens", 8, "--dtype", "float32"]
    (row,) = run(dtype_agreement, *options)["rows"]
    assert row["agreeing %"] == pytest.approx(100 * 2 / row["positions"])
    assert row["earliest difference after"] == 2


def test_dtype_agreement_has_50_different_prompts() -> None:
    assert len(set(dtype_agreement.PROMPTS)) == 50


def test_vs_huggingface(run: Run, tmp_path: Path) -> None:
    options = ["--batch", 1, 8, "--prompt-tokens", 6, "--output-tokens", 4]
    options += ["--prefill-tokens", 20, "--mixed", 10, "--mixed-prompt", 2, 9]
    options += ["--mixed-output", 1, 5, "--llama-batched-bench", tmp_path / "not-here"]
    result = run(vs_huggingface, *options)
    workloads = [row["workload"] for row in result["rows"]]
    assert workloads == ["batch 1", "batch 8", "prefill", "mixed"]
    for row in result["rows"]:
        better = max(row["HF float32"], row["HF bfloat16"])
        assert row["/ better HF"] == pytest.approx(row["mini-infer"] / better)
        assert row["llama.cpp F16"] is None
    assert [bar["met"] is None for bar in result["bars"]] == [False] * 4 + [True]
    skipped, same = result["notes"]
    assert "llama.cpp: skipped" in skipped
    assert same == "identical float32 outputs: 9 of 9"


def test_vs_huggingface_with_some_contenders(run: Run) -> None:
    options = ["--batch", 2, "--output-tokens", 2, "--mixed", 2, "--prefill-tokens", 8]
    result = run(vs_huggingface, "--contenders", "mini-infer", *options)
    assert all(row["/ better HF"] is None for row in result["rows"])
    assert result["notes"] == []


def test_an_unknown_model_is_a_typed_error() -> None:
    with pytest.raises(ModelNotFoundError):
        prefix_cache.main(["--model", "no-such-model", "--threads", "1"])


def test_the_suite_and_the_command_line_know_every_script() -> None:
    scripts = set(benchmarks(FOLDER))
    tools = {"suite", "report", "trace_summary"}
    assert scripts <= {*suite.BENCHMARKS, *suite.GPU_BENCHMARKS, *tools}
    assert set(suite.BENCHMARKS) <= scripts
    assert all(benchmarks(FOLDER).values()), "each has a first line to show"


def test_the_suite_hands_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {}

    def call(command: list[str]) -> int:
        calls[Path(command[1]).stem] = command[2:]
        return int("prefix_cache" in command[1])

    monkeypatch.setattr("subprocess.call", call)
    folder = tmp_path / "results"
    code = suite.main(["--quick", "--model", "m", "--output-folder", str(folder)])
    assert code == 1, "a script that failed shows"
    assert list(calls) == list(suite.BENCHMARKS)
    assert calls["startup"] == ["--runs", "1", "--output", str(folder / "startup.json")]
    assert calls["prefix_cache"][:3] == ["--model", "m", "--quick"]
    assert calls["replicas"][:2] == ["--quick", "--output"]


def test_peers_go_on_after_an_end_of_sequence(model_folder: Path, tmp_path: Path) -> None:
    """Both sides write that token and what follows it, so float32 outputs can be identical."""
    job = Job([7, 8, 9], 6)
    (plain,) = HuggingFace(model_folder, "float32", "cpu").generate([job])[1]
    folder = tmp_path / "ends-early"
    shutil.copytree(model_folder, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": plain[2]}
        (folder / name).write_text(json.dumps(config))
    (theirs,) = HuggingFace(folder, "float32", "cpu").generate([job])[1]
    with LLM(str(folder), dtype="float32", max_model_len=16) as llm:
        client = serve(llm, [job])
    (ours,) = (output.outputs[0].token_ids for output in client.outputs.values())
    assert ours == theirs == plain
    assert len(plain) == 6
