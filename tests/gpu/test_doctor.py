"""What the doctor says of a card beforehand is what an engine finds on it, within a twentieth."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer.cli.doctor import probe
from mini_infer.runtime.resolve import resolve_core

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True, "max_num_batched_tokens": 2048},
        {"speculative_config": {"method": "early_exit", "num_speculative_tokens": 4}},
    ],
    ids=str,
)
def test_blocks_are_as_many_as_was_foretold(options: dict[str, Any]) -> None:
    asked = {"model": str(MODELS / "qwen2.5-1.5b"), "load_format": "dummy", "device": "cuda"}
    asked |= options
    torch.cuda.empty_cache()
    foretold = probe.ask("plan", {"options": asked}, 120)
    assert "error" not in foretold, foretold
    _, executor = resolve_core(asked)
    try:
        assert executor.start() == pytest.approx(foretold["num_kv_blocks"], rel=0.05)
    finally:
        executor.shutdown()


def test_each_card_computes_and_ranks_reach_each_other() -> None:
    found = probe.ask("devices", {}, 90)
    assert all(gpu["error"] is None for gpu in found["gpus"]), found
    count = torch.cuda.device_count()
    assert len(found["gpus"]) == count
    if count > 1:
        reduced = probe.ask("collective", {"backend": "nccl", "size": count}, 60)
        assert reduced.get("seconds", 60.0) < 1.0, reduced
