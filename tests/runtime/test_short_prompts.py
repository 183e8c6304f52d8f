"""Short prompts do not wait for long ones, and long ones do not wait for ever."""

import itertools

import pytest

from mini_infer.core.events import ChunkScheduled, Event, TokensEmitted
from mini_infer.runtime.engine import LLMEngine
from tests.runtime.engine_tools import fake_engine, greedy, step

CHUNK = 16
PROMPT = itertools.count()


def new_prompt(length: int) -> list[int]:
    """One that no other shares a block with."""
    number = next(PROMPT)
    return [number % 256, number // 256, *(3 for _ in range(length - 2))]


@pytest.fixture
def engine() -> LLMEngine:
    return fake_engine(
        max_model_len=512,
        max_num_batched_tokens=CHUNK,
        num_kv_blocks=4096,
        max_num_seqs=64,
        depth=1,
    )


def steps_to_first_token(engine: LLMEngine, request_id: str) -> int:
    emitted: list[Event] = []
    engine.events.subscribe(emitted.append, TokensEmitted)
    for count in range(1, 200):
        step(engine)
        if any(isinstance(e, TokensEmitted) and e.request_id == request_id for e in emitted):
            engine.events.unsubscribe(emitted.append)
            return count
    raise AssertionError("no token")


def test_a_short_prompt_has_its_token_in_a_step_of_its_own_arrival(engine: LLMEngine) -> None:
    engine.add_request("long", new_prompt(400), greedy())
    step(engine)
    engine.add_request("short", new_prompt(CHUNK // 2), greedy())
    assert steps_to_first_token(engine, "short") == 1


def test_one_that_is_cut_is_completed_before_long_ones_go_on(engine: LLMEngine) -> None:
    """Behind a flood: the newcomers' share admits a long one a step, and the last comes then."""
    for number in range(4):
        engine.add_request(f"long {number}", new_prompt(400), greedy())
    engine.add_request("first", new_prompt(6), greedy())
    engine.add_request("second", new_prompt(6), greedy())
    assert steps_to_first_token(engine, "second") <= 7


def test_the_first_long_prompt_has_a_quarter_of_each_step(engine: LLMEngine) -> None:
    chunks: list[Event] = []
    engine.events.subscribe(chunks.append, ChunkScheduled)
    engine.add_request("long", new_prompt(400), greedy())
    step(engine)
    for number in range(20):
        engine.add_request(f"short {number}", new_prompt(3 * CHUNK // 4), greedy(max_tokens=1))
        step(engine)
    own = [
        c.num_new_tokens for c in chunks if isinstance(c, ChunkScheduled) and c.request_id == "long"
    ]
    assert own == [CHUNK, *[CHUNK // 4] * 20]


def test_nobody_else_there_it_has_all(engine: LLMEngine) -> None:
    engine.add_request("long", new_prompt(160), greedy())
    assert steps_to_first_token(engine, "long") == 160 // CHUNK
