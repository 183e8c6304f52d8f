"""How many ranks there are, and where: decided and refused before anything loads."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer.core.engine_config import MAX_DEPTH
from mini_infer.core.errors import InvalidConfigError
from mini_infer.runtime import resolve_parallel
from mini_infer.runtime.local_executor import LocalExecutor
from mini_infer.runtime.mp_executor import MultiProcessExecutor
from mini_infer.runtime.resolve import resolve_core

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return {"model": str(tmp_path), "load_format": "dummy"}


def test_one_rank_runs_in_the_engines_process(model: dict[str, Any]) -> None:
    config, executor = resolve_core(model)
    assert (config.tensor_parallel_size, config.distributed_executor_backend) == (1, "local")
    assert isinstance(executor, LocalExecutor)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
    ],
)
def test_several_run_in_processes(model: dict[str, Any], options: dict[str, Any]) -> None:
    config, executor = resolve_core({**model, **options, "device": "cpu"})
    assert config.distributed_executor_backend == "mp"
    assert isinstance(executor, MultiProcessExecutor)  # which has not started any
    executor.shutdown()


def test_a_pipeline_is_filled(model: dict[str, Any]) -> None:
    """With a step for each stage; and one more, unless drafts need known tokens."""
    stages = {**model, "pipeline_parallel_size": 2, "device": "cpu"}
    assert resolve_core(stages)[0].depth == 3
    assert resolve_core({**stages, "depth": 1})[0].depth == 1
    assert resolve_core({**stages, "speculative_config": {"method": "ngram"}})[0].depth == 2
    assert resolve_core({"dry_run": True, "pipeline_parallel_size": 2})[0].depth == 1


def test_a_long_pipeline_is_filled_as_far_as_can_be(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": MAX_DEPTH}))
    options = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu"}
    config, _ = resolve_core({**options, "pipeline_parallel_size": MAX_DEPTH})
    assert config.depth == MAX_DEPTH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "3 does not divide .* 4 attention heads: .* 1, 2, 4"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be 1 or more, got 0"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "local"},
            "2 needs as many processes: leave distributed_executor_backend at auto",
        ),
        ({"pipeline_parallel_size": 3}, "3 is more than the model's 2 layers"),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "local"},
            "a pipeline_parallel_size of 2 needs as many processes",
        ),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "early_exit"}},
            "early_exit drafts where the model is, .* use ngram or a class of yours on the host",
        ),
        ({"distributed_executor_backend": "mpi"}, "must be one of local, mp, ray, got 'mpi'"),
    ],
)
def test_what_can_not_be(model: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        resolve_core({**model, **options, "device": "cpu"})


def test_gpus_that_are_not_there(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert resolve_core({**model, "tensor_parallel_size": 2})[0].device == "cuda"
    with pytest.raises(InvalidConfigError, match="4 needs as many GPUs, torch sees 2"):
        resolve_core({**model, "tensor_parallel_size": 4})
    both = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with pytest.raises(InvalidConfigError, match="size 2 needs 4 GPUs, torch sees 2"):
        resolve_core({**model, **both})


def test_a_package_that_is_missing(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        resolve_parallel.importlib.util,
        "find_spec",
        lambda name: None if name == "zmq" else found(name),
    )
    with pytest.raises(InvalidConfigError, match="need pyzmq: pip install pyzmq"):
        resolve_core({**model, "tensor_parallel_size": 2})


def test_ray_is_a_package_of_its_own(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        resolve_parallel.importlib.util,
        "find_spec",
        lambda name: None if name == "ray" else found(name),
    )
    with pytest.raises(InvalidConfigError, match=r"ranks on Ray need 'mini-infer\[ray\]': pip"):
        resolve_core({**model, "distributed_executor_backend": "ray"})


def test_a_dry_run_has_no_weights_to_spread() -> None:
    config, _ = resolve_core({"dry_run": True, "tensor_parallel_size": 4})
    assert config.tensor_parallel_size == 1
