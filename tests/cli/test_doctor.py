"""``mini-infer doctor``: what it says, and that nothing makes it hang or show a traceback."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer.cli.doctor import command, machine, probe
from mini_infer.cli.doctor.machine import parse_links
from mini_infer.cli.doctor.plan import examine
from mini_infer.cli.main import main
from mini_infer.core.errors import InvalidConfigError, ModelNotFoundError
from mini_infer.runtime import resolve
from mini_infer.runtime.resolve import resolve_core

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CARD = {"name": "A card", "capability": "9.0", "free": 2**36, "total": 2**37, "error": None}
NO_GPU: dict[str, Any] = {"torch": "2.13", "cuda": None, "gpus": []}
TWO_GPUS: dict[str, Any] = {
    "torch": "2.13",
    "cuda": "13.0",
    "nccl": "2.28",
    "gpus": [{"index": 0, **CARD}, {"index": 1, **CARD, "error": "unspecified launch failure"}],
    "peers": [[True, True], [False, True]],
}
FASTER: dict[str, Any] = {"seconds": 0.001}
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs the command; probes answer what the test says, but a plan is made in this process."""

    def run(*arguments: str, **answers: dict[str, Any]) -> tuple[int, str]:
        def ask(name: str, given: dict[str, Any], seconds: float) -> dict[str, Any]:
            assert 0 < seconds <= 120
            key = given.get("backend", name)
            if name == "plan" and "plan" not in answers:
                return examine(**given)
            usual = {"devices": NO_GPU, "gloo": FASTER, "nccl": FASTER}
            return (usual | answers)[key]

        monkeypatch.setattr(command, "ask", ask)
        code = main(["doctor", *arguments])
        captured = capsys.readouterr()
        assert captured.err == ""
        return code, captured.out

    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "links", lambda: {(0, 1): "NV18"})
    return run


def test_a_machine_without_a_gpu_is_well(run: Run, tmp_path: Path) -> None:
    code, out = run()
    assert code == 0, out
    assert "none (torch is built without CUDA)" in out
    assert "1 MiB added up in 1.00 ms" in out
    assert "Engine" not in out
    assert not (tmp_path / "cache").exists()


def test_what_does_not_work_is_named_with_a_hint(run: Run) -> None:
    code, out = run(devices=TWO_GPUS, nccl={"error": "no answer within 60 s"})
    assert code == 1
    lines = out.splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith("  FAIL")] == [
        ["GPU", "1"],
        ["nccl,", "2"],
    ]
    assert "unspecified launch failure" in out
    assert "0: no (NV18)" in out
    assert "1: yes (NV18)" in out
    assert "NCCL_DEBUG=INFO" in out


def test_json_says_the_same(run: Run, model: Path) -> None:
    code, out = run("--json", "--model", str(model), "--num-kv-blocks", "9")
    report = json.loads(out)
    assert code == 0
    assert report["ok"] is True
    assert report["plan"]["num_kv_tokens"] == 9 * 16
    assert report["devices"] == NO_GPU
    names = [finding["name"] for finding in report["findings"]]
    assert {"Python", "torch", "memory", "cache folder", "KV cache", "verdict"} <= set(names)


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_blocks": 7}, {"kv_cache_memory": "1MiB", "dtype": "float16"}], ids=str
)
def test_an_engine_has_the_blocks_that_were_foretold(model: Path, options: dict[str, Any]) -> None:
    asked = {"model": str(model), "load_format": "dummy", "device": "cpu", **options}
    foretold = examine(asked)
    _, executor = resolve_core(asked)
    assert executor.start() == foretold["num_kv_blocks"]
    executor.shutdown()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--num-kv-blocks 2", 0, "--max-model-len 33 would fit"),
        ("--num-kv-blocks 2 --max-model-len 50", 1, "a request may have 33 tokens at most"),
        ("--num-kv-blocks 16777216 --block-size 512", 1, "FAIL  verdict"),
        ("--tensor-parallel-size 2", 0, "on each rank"),
        ("--tensor-parallel-size 3", 1, "--tensor-parallel-size 2 would fit"),
        ("--pipeline-parallel-size 2", 0, "2 ranks in 2 stages"),
        ("--pipeline-parallel-size 99", 1, "is more than the model's"),
        ("--block-size 0", 1, "block_size must be 1 or more"),
        ("--kv-cache-memory much", 1, "must be a size such as 2GiB"),
        ("--device cuda", 1, "torch sees no GPU"),
        ('--speculative-config \'{"method": "early_exit"}\'', 0, "it fits"),
    ],
)
def test_plans(run: Run, model: Path, arguments: str, code: int, message: str) -> None:
    found, out = run("--device", "cpu", "--model", str(model), *shlex.split(arguments))
    assert message in out
    assert found == code


def test_a_draft_model_counts_and_an_unknown_model_is_a_finding(run: Run, model: Path) -> None:
    draft = json.dumps({"method": "draft_model", "model": str(model)})
    code, out = run("--model", str(model), "--speculative-config", draft, "--json")
    assert code == 0
    plan = json.loads(out)["plan"]
    assert plan["draft_weight_bytes"] == plan["rank_weight_bytes"][0]
    alone = examine({"model": str(model)})
    assert plan["kv_bytes_per_token"] == 2 * alone["kv_bytes_per_token"]
    broken = {"plan": {"error": "no model 'x'"}}
    code, out = run("--model", "x", **broken)
    assert (code, "FAIL  plan" in out) == (1, True)


@pytest.mark.parametrize(("num_gpus", "told"), [(1, None), (0, "on other hosts: run the doctor")])
def test_a_plan_for_a_cluster(
    num_gpus: int, told: str | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which each host is like this one."""
    pytest.importorskip("ray")
    monkeypatch.setattr(resolve, "cluster_has_gpus", lambda given: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**36, 2**37))
    options = {"model": str(model), "distributed_executor_backend": "ray", "dtype": "float32"}
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "attention_backend": "torch"}
    if told is None:
        found = examine({**options, **ranks})
        assert found["fits"]
        assert len(found["rank_weight_bytes"]) == len(found["free_bytes"]) == 4
    else:
        with pytest.raises(InvalidConfigError, match=told):
            examine({**options, **ranks})


def test_an_alias_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="mini-infer pull smollm2-135m fetches it"):
        examine({"model": "smollm2-135m"})


def test_missing_packages(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    version_of = machine.version_of
    for module in (machine, command):
        monkeypatch.setattr(
            module, "version_of", lambda name: None if name == "torch" else version_of(name)
        )
    code, out = run("--model", "x")
    assert code == 1
    assert "pip install torch" in out
    assert "Devices" not in out


def test_a_cache_folder_that_is_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path / "file" / "below"))
    code, out = run()
    assert code == 1
    assert "can't write to" in out
    assert "MINI_INFER_CACHE" in out


def test_links_of_four_gpus() -> None:
    table = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\t0-47\nGPU1\tNV18\t X \tPHB\t0-47\nGPU2\tSYS\tPHB\t X \t0-47\n"
        "\nLegend:\n\n  X    = Self\n"
    )
    assert parse_links(table) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}


def test_links_are_of_the_gpus_that_torch_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU0\\t X \\tNV6\\nGPU1\\tNV6\\t X \\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.links() == {(0, 1): "NV6"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert machine.links() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool.unlink()
    assert machine.links() is None


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import sys; sys.exit('no driver')", "no driver"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the process ended with -9"),
        ("import time; time.sleep(60)", "no answer within 0 s"),
        ("print('{')", "the process ended with 0"),
    ],
)
def test_a_probe_that_fails_is_an_answer(
    program: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S -c {shlex.quote(program)}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    seconds = 0.2 if "sleep" in program else 20
    assert probe.ask("devices", {}, seconds) == {"error": error}


def test_two_processes_add_up() -> None:
    """The real probe, with processes, sockets and all."""
    found = probe.ask("collective", {"backend": "gloo", "size": 2}, 60)
    assert 0 < found["seconds"] < 10


def test_what_a_probe_raises_is_its_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def devices() -> dict[str, Any]:
        os.write(1, b"noise of a library\n")
        raise RuntimeError("a\nb")

    monkeypatch.setitem(probe.PROBES, "devices", devices)
    monkeypatch.setattr(sys, "argv", ["probe", "devices"])
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    monkeypatch.setattr(json, "load", lambda stream: {})
    saved = os.dup(1)
    try:
        probe.main()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"error": "a b"}
    assert "noise" in captured.err
