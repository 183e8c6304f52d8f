import importlib
from collections.abc import Iterator

import pytest
import torch

from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.modeling import profiling

BATCH = ScheduledBatch(7, (Chunk("a", 0, 0, 5), Chunk("b", 1, 9, 1)))
NAMES = ["step 7: 2 requests, 6 tokens", "layer 3"]


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    profiling.disable_ranges()


def run_ranges() -> None:
    with profiling.step_range(BATCH), profiling.layer_range(3):
        torch.zeros(1)


def test_ranges_are_one_object_that_does_nothing_by_default() -> None:
    assert profiling.step_range(BATCH) is profiling.layer_range(3)
    run_ranges()


def test_torch_profiler_sees_the_ranges_while_they_are_on() -> None:
    def recorded() -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run_ranges()
        return [event.name for event in profile.events() if event.name in NAMES]

    profiling.enable_ranges("profiler")
    assert recorded() == NAMES
    profiling.disable_ranges()
    assert recorded() == []


def test_nvtx_ranges_open_and_close_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    profiling.enable_ranges("nvtx")
    run_ranges()
    assert calls == [*NAMES, "end", "end"]


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False)])
def test_the_environment_turns_nvtx_on(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(profiling.NVTX_VARIABLE, value)
    importlib.reload(profiling)
    assert (profiling._open_range is not None) is on
