from collections.abc import Sequence

import pytest
from client import Job, serve
from kv_waste import KVWaste

from mini_infer import LLM
from mini_infer.core.events import ChunkScheduled, Event, Finished, Preempted, StepCompleted


def completed(num_used_blocks: int) -> StepCompleted:
    return StepCompleted(0.0, 0, 1, 0, 1, 0, num_used_blocks, 100)


def chunk(request_id: str, start: int, count: int) -> ChunkScheduled:
    return ChunkScheduled(0.0, request_id, 0, start, count)


@pytest.mark.parametrize(
    ("events", "percent"),
    [
        ([], 0),
        ([chunk("a", 0, 4), completed(1)], 0),
        ([chunk("a", 0, 1), completed(1)], 75),
        ([chunk("a", 0, 4), chunk("a", 4, 1), completed(2)], 37.5),
        ([chunk("a", 0, 4), completed(1), chunk("b", 0, 2), completed(2)], 100 * 2 / 12),
        ([chunk("a", 0, 3), Preempted(0.0, "a", 3), chunk("b", 0, 2), completed(1)], 50),
        ([chunk("a", 0, 4), chunk("b", 0, 4), Finished(0.0, "a", "stop", 4, 1), completed(1)], 0),
    ],
)
def test_waste(events: Sequence[Event], percent: float) -> None:
    waste = KVWaste(block_size=4)
    for event in events:
        waste.observe(event)
    assert waste.percent == pytest.approx(percent)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_wastes_less_than_a_block_a_request(depth: int) -> None:
    with LLM(dry_run=True, max_model_len=64, block_size=8, depth=depth) as llm:
        waste = KVWaste(8)
        llm.engine.events.subscribe(waste.observe)
        serve(llm, [Job([1] * 17, 16)])
    # Of 17 to 32 tokens in blocks of 8, there is room for 0 to 7 more.
    assert 0 < waste.percent < 100 * 7 / 24
