from pathlib import Path

import card
import pytest
from client import Job
from limits import Card, ModelCost, step_seconds, workload_seconds

from mini_infer.cli.bench import FOLDER
from mini_infer.modeling.model_files import ModelFiles, load_model_config

H200 = Card("H200", bytes_per_second=4.16e12, flops_per_second=774e12)
TOY = ModelCost(
    layer_parameters=100,
    last_token_parameters=30,
    head_parameters=10,
    kv_values_per_token=4,
    flops_per_pair=8,
)


def cost_of(name: str) -> ModelCost:
    folder = FOLDER / "models" / name
    return ModelCost.of(load_model_config(ModelFiles(folder, folder)))


@pytest.mark.parametrize(
    ("name", "gigabytes", "kv_bytes"),
    [("qwen2.5-7b", 14.14, 57344), ("qwen3-0.6b", 1.19, 114688), ("qwen2.5-1.5b", 3.09, 28672)],
)
def test_bytes_of_known_models(name: str, gigabytes: float, kv_bytes: int) -> None:
    cost = cost_of(name)
    assert cost.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert cost.kv_values_per_token * cost.bytes_per_value == kv_bytes


@pytest.mark.parametrize(("name", "tokens_per_second"), [("qwen2.5-7b", 293), ("qwen3-0.6b", 3430)])
def test_a_lone_request_is_limited_by_the_weights(name: str, tokens_per_second: float) -> None:
    seconds = workload_seconds(H200, cost_of(name), [Job([0] * 128, 256)])
    assert 256 / seconds == pytest.approx(tokens_per_second, rel=0.01)


def test_a_prefill_is_limited_by_its_arithmetic() -> None:
    cost = cost_of("qwen2.5-7b")
    jobs = [Job([0] * 2048, 1)] * 32
    seconds = workload_seconds(H200, cost, jobs)
    needed = cost.layer_parameters * 27 / 28  # the last block's, apart from keys and values
    products = 32 * 2048 * 2 * needed / H200.flops_per_second
    assert products < seconds < 1.1 * products


def test_a_step_takes_as_long_as_the_slower_of_the_two() -> None:
    reading = Card("slow memory", bytes_per_second=1, flops_per_second=1e9)
    assert step_seconds(reading, TOY, rows=2, tokens=2, pairs=6, kv=6) == 2 * (110 + 6 * 4)
    computing = Card("slow arithmetic", bytes_per_second=1e9, flops_per_second=1)
    flops = 2 * (2 * 100 + 2 * 10) + 6 * 8
    assert step_seconds(computing, TOY, rows=2, tokens=2, pairs=6, kv=6) == flops


def test_a_workload_is_its_prompts_and_then_its_tokens_in_lock_step() -> None:
    card = Card("slow memory", bytes_per_second=1, flops_per_second=1e9)
    jobs = [Job([0] * 5, 1), Job([0] * 3, 3)]
    contexts = [5 + 3, 4, 5]  # tokens read: both prompts, then the one that goes on
    assert workload_seconds(card, TOY, jobs) == sum(2 * (110 + 4 * kv) for kv in contexts)


def test_cached_tokens_are_read_and_not_computed() -> None:
    card = Card("slow arithmetic", bytes_per_second=1e9, flops_per_second=1)
    seconds = workload_seconds(card, TOY, [Job([0] * 10, 1)], cached=8)
    pairs = 9 + 10
    assert seconds == 2 * (2 * 70 + 30 + 10) + 8 * pairs


def test_a_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "CPU_READ_BYTES", 1 << 16)
    monkeypatch.setattr(card, "CPU_SIDE", 32)
    measured = card.measure_card("cpu")
    assert measured.name == "CPU"
    assert measured.bytes_per_second > 0
    assert measured.flops_per_second > 0
    assert set(measured.summary) == {"read TB/s", "TFLOP/s"}


def test_models_have_a_readme() -> None:
    folder: Path = FOLDER / "models"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert all(path.name in text for path in folder.iterdir() if path.is_dir())
