"""The engine's loop: depth, aborts, failures, ids; over the fake executor."""

import gc
import logging

import pytest

from mini_infer.core.errors import InvalidRequestError, PromptTooLongError
from mini_infer.core.events import Event, Finished, Queued
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from tests.runtime.engine_tools import engine_with, fake_engine, generate, greedy, run, step
from tests.runtime.fake_executor import FakeExecutor, expected_output, make_config

PROMPT = list(b"hello there")


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depth_is_how_many_steps_are_in_flight(depth: int) -> None:
    config = make_config(depth=depth)
    executor = FakeExecutor(config)
    engine = engine_with(executor, depth=depth)
    prompts = [PROMPT, list(b"another prompt"), [7]]
    outputs = generate(engine, prompts, greedy(20, ignore_eos=True))
    assert executor.max_in_flight == depth
    assert outputs == [expected_output(prompt, 20, frozenset()) for prompt in prompts]


def test_an_idle_engine_does_nothing() -> None:
    engine = fake_engine()
    assert engine.step() == []
    assert not engine.has_unfinished()


def test_the_number_of_blocks_is_the_executors() -> None:
    assert fake_engine(num_kv_blocks=17).config.num_kv_blocks == 17


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = fake_engine()
    engine.add_request("a", PROMPT, greedy())
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("a", PROMPT, greedy())
    first = run(engine)["a"].outputs[0].token_ids
    engine.add_request("a", PROMPT, greedy())
    assert run(engine)["a"].outputs[0].token_ids == first


def test_a_request_refused_while_others_run_leaves_no_trace() -> None:
    engine = fake_engine(num_kv_blocks=8, max_model_len=256)
    engine.add_request("good", [1, 2, 3], greedy(10, ignore_eos=True))
    step(engine)
    for name, prompt in (("long", [1] * 300), ("big", [1] * 200), ("empty", []), ("odd", [10**9])):
        with pytest.raises(InvalidRequestError):
            engine.add_request(name, prompt, greedy())
        step(engine)
    outputs = run(engine)
    assert outputs.keys() == {"good"}
    assert outputs["good"].outputs[0].token_ids == expected_output([1, 2, 3], 10, frozenset())


def test_a_choice_that_does_not_fit_takes_its_siblings_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler refuses the third of four: none may run on without anyone to read it."""
    engine = fake_engine()
    original, count = engine.scheduler.add, 0

    def refusing(request: object) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise PromptTooLongError("as told", "prompt")
        original(request)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.scheduler, "add", refusing)
    with pytest.raises(PromptTooLongError, match="as told"):
        engine.add_request("a", PROMPT, SamplingParams(n=4))
    assert not engine.scheduler.has_unfinished()
    monkeypatch.undo()
    engine.add_request("a", PROMPT, greedy())
    assert run(engine)["a"].outputs[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps_before", range(5))
def test_abort_tells_its_last_delta_with_the_next_step(depth: int, steps_before: int) -> None:
    engine = fake_engine(depth=depth, max_num_batched_tokens=8)
    engine.add_request("a", PROMPT, greedy(50, ignore_eos=True))
    engine.add_request("b", PROMPT, greedy(6, ignore_eos=True))
    for _ in range(steps_before):
        step(engine)
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    last = [delta for delta in step(engine) if delta.request_id == "a"]
    assert [delta.finish_reason for delta in last] == ["abort"]
    assert last[0].output is not None
    outputs = run(engine)
    assert outputs["b"].outputs[0].token_ids == expected_output(PROMPT, 6, frozenset())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_ends_what_it_held_and_is_logged(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(depth=depth)
    executor = FakeExecutor(config)
    executor.fail_at = {0}
    engine = engine_with(executor, depth=depth)
    engine.add_request("a", PROMPT, greedy())
    with caplog.at_level(logging.ERROR):
        output = run(engine)["a"]
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "RuntimeError: the fake model fails as told"
    assert "step 0 failed" in caplog.text
    executor.fail_at = set()
    assert generate(engine, [PROMPT], greedy(5, ignore_eos=True)) == [
        expected_output(PROMPT, 5, frozenset())
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("how", ["abort", "error"])
def test_a_request_that_is_not_streamed_ends_early_with_what_it_has(depth: int, how: str) -> None:
    engine = fake_engine(depth=depth)
    expected = expected_output(PROMPT, 50, frozenset())
    engine.add_request("a", PROMPT, greedy(50, ignore_eos=True), stream=False)
    for _ in range(6):
        assert step(engine) == []
    if how == "abort":
        engine.abort("a")
    else:
        engine.core.executor.fail_at = set(range(100))  # type: ignore[attr-defined]
    choice = run(engine)["a"].outputs[0]
    assert choice.finish_reason == how
    assert 0 < len(choice.token_ids) < 50
    assert choice.token_ids == expected[: len(choice.token_ids)]
    assert choice.text == ByteTokenizer().decode(choice.token_ids)


def test_every_request_is_queued_once_and_finished_once() -> None:
    engine = fake_engine()
    seen: list[Event] = []
    engine.events.subscribe(seen.append)
    for index in range(5):
        engine.add_request(str(index), PROMPT[index:], greedy())
    engine.abort("3")
    run(engine)
    for kind in (Queued, Finished):
        names = [event.request_id for event in seen if isinstance(event, kind)]
        assert sorted(names) == ["0", "1", "2", "3", "4"]


def test_resetting_the_prefix_cache_forgets_it() -> None:
    engine = fake_engine()
    for expected_hit in (False, True):
        engine.add_request("a", PROMPT, greedy())
        assert (run(engine)["a"].num_cached_tokens > 0) == expected_hit
    engine.reset_prefix_cache()
    engine.add_request("a", PROMPT, greedy())
    assert run(engine)["a"].num_cached_tokens == 0


def test_shutdown_twice_is_harmless() -> None:
    engine = fake_engine()
    engine.shutdown()
    engine.shutdown()


def test_what_start_up_made_is_out_of_the_collectors_sight_until_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config()
    parts = (config, FakeExecutor(config), ByteTokenizer())
    monkeypatch.setattr("mini_infer.runtime.engine.resolve_engine", lambda options: parts)
    engine = LLMEngine.from_options()
    assert gc.get_freeze_count() > 0
    assert generate(engine, [PROMPT], greedy(5, ignore_eos=True)) == [
        expected_output(PROMPT, 5, frozenset())
    ]
    engine.shutdown()
    assert gc.get_freeze_count() == 0
