"""Of the requests in a step that raises, only the one that makes it raise fails."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.events import Finished
from mini_infer.core.outputs import RequestOutput
from mini_infer.runtime.engine import LLMEngine
from tests.runtime.engine_tools import fake_engine, greedy, run, step
from tests.runtime.fake_executor import FakeExecutor, expected_output

PARAMS = greedy(8, ignore_eos=True)


def prompt_of(index: int, length: int = 9) -> list[int]:
    """Two blocks that all share, and what is its own."""
    return [*range(8), *((7 * index + 3 * place) % 256 for place in range(length - 8))]


def executor_of(engine: LLMEngine) -> FakeExecutor:
    executor = engine.core.executor
    assert isinstance(executor, FakeExecutor)
    return executor


def add(engine: LLMEngine, count: int, **options: Any) -> None:
    for index in range(count):
        engine.add_request(str(index), prompt_of(index, 9 + index % 3), PARAMS, **options)


def check(outputs: dict[str, RequestOutput], count: int, guilty: set[str]) -> None:
    for index in range(count):
        choice = outputs[str(index)].outputs[0]
        if str(index) in guilty:
            assert choice.finish_reason == "error"
            assert choice.stop_reason == "RuntimeError: the fake model fails as told"
        else:
            expected = expected_output(prompt_of(index, 9 + index % 3), 8, frozenset())
            assert choice.token_ids == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", [1, 9, 11, 15])
def test_only_the_guilty_request_fails(depth: int, at: int, stream: bool) -> None:
    """It raises in its prompt, with its first token, or in the middle of its answer."""
    engine = fake_engine(depth=depth, num_kv_blocks=64, max_num_batched_tokens=32)
    executor_of(engine).poison = {"5": at}
    add(engine, 8, stream=stream)
    check(run(engine), 8, {"5"})
    assert executor_of(engine).num_failed <= 6
    executor_of(engine).poison = {}
    add(engine, 8)
    check(run(engine), 8, set())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_guilty_requests_are_found_in_one_trial(depth: int) -> None:
    """All 8 raise together, then on each side a half, a quarter, and the guilty one."""
    engine = fake_engine(depth=depth, num_kv_blocks=64, enable_prefix_caching=False)
    executor_of(engine).poison = {"0": 10, "5": 10}
    for index in range(8):
        engine.add_request(str(index), prompt_of(index, 10), PARAMS)
    outputs = run(engine)
    ends = [outputs[str(index)].outputs[0].finish_reason for index in range(8)]
    assert [str(index) for index, end in enumerate(ends) if end == "error"] == ["0", "5"]
    assert executor_of(engine).num_failed == 7


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 12),
    poison=st.dictionaries(st.integers(0, 11), st.integers(1, 18), max_size=3),
    depth=st.integers(1, 3),
    blocks=st.sampled_from([6, 12, 64]),
    chunk=st.sampled_from([3, 8, 64]),
    slots=st.sampled_from([2, 8]),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_whoever_is_guilty_and_however_steps_are_made(
    count: int,
    poison: dict[int, int],
    depth: int,
    blocks: int,
    chunk: int,
    slots: int,
    caching: bool,
    policy: str,
) -> None:
    engine = fake_engine(
        depth=depth,
        num_kv_blocks=blocks,
        max_num_batched_tokens=max(chunk, slots),
        max_num_seqs=slots,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
    )
    executor_of(engine).poison = {str(index): at for index, at in poison.items()}
    for index in range(count):
        prompt = prompt_of(index, 9 + index % 3)
        engine.add_request(str(index), prompt, PARAMS, priority=-index)
    # A request of 9 + i % 3 tokens never computes more than these and 7 of its own.
    guilty = {str(i) for i, at in poison.items() if i < count and at <= 9 + i % 3 + 7}
    check(run(engine), count, guilty)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_always_raises_fails_everybody_soon(depth: int) -> None:
    engine = fake_engine(
        depth=depth, max_num_seqs=64, max_num_batched_tokens=1024, enable_prefix_caching=False
    )
    executor_of(engine).poison = {str(index): 1 for index in range(64)}
    add(engine, 64)
    check(run(engine), 64, {str(index) for index in range(64)})
    assert executor_of(engine).num_failed < 40


def test_a_suspect_that_is_aborted_is_forgotten() -> None:
    engine = fake_engine()
    executor_of(engine).poison = {"2": 10}
    add(engine, 4)
    while executor_of(engine).num_failed == 0:
        step(engine)
    engine.abort("2")
    check({**run(engine), "2": None}, 2, set())  # type: ignore[dict-item]
    assert executor_of(engine).num_failed == 1


def test_who_comes_during_a_trial_is_not_drawn_into_it() -> None:
    engine = fake_engine(max_num_seqs=16)
    executor_of(engine).poison = {"6": 12}
    finished: list[Any] = []
    engine.events.subscribe(finished.append, Finished)
    add(engine, 8)
    while executor_of(engine).num_failed == 0:
        step(engine)
    engine.add_request("late", prompt_of(20), PARAMS)
    outputs = run(engine)
    check(outputs, 8, {"6"})
    expected = expected_output(prompt_of(20), 8, frozenset())
    assert outputs["late"].outputs[0].token_ids == expected
    assert sorted(event.request_id for event in finished) == sorted([*map(str, range(8)), "late"])
