"""Who enters, who is displaced, who is told: the scheduler's edges over the fake executor."""

import pytest

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.events import Admitted, ChunkScheduled, Event, Finished, Preempted
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.policy import FirstComeFirstServed
from tests.runtime.engine_tools import fake_engine, generate, greedy, run, step
from tests.runtime.test_scheduler import oracle, prompt_of


def test_two_prompts_that_fit_singly_but_not_together_enter_one_after_the_other() -> None:
    engine = fake_engine(
        num_kv_blocks=10, block_size=4, max_num_batched_tokens=6, enable_prefix_caching=False
    )
    events: list[Event] = []
    engine.events.subscribe(events.append)
    for name, seed in (("a", 0), ("b", 1)):
        engine.add_request(name, prompt_of(24, seed), greedy(2, ignore_eos=True))
    run(engine)
    kinds = [type(e).__name__ + e.request_id for e in events if isinstance(e, Admitted | Finished)]
    assert kinds == ["Admitteda", "Finisheda", "Admittedb", "Finishedb"]
    assert not any(isinstance(event, Preempted) for event in events)


def test_nobody_is_displaced_for_a_newcomer_who_could_not_enter_even_then() -> None:
    engine = fake_engine(scheduling_policy="priority", num_kv_blocks=16, block_size=4)
    events: list[Event] = []
    engine.events.subscribe(events.append)
    engine.add_request("high", prompt_of(36), greedy(20, ignore_eos=True), priority=0)
    engine.add_request("low", prompt_of(4, 1), greedy(8, ignore_eos=True), priority=9)
    for _ in range(2):
        step(engine)
    engine.add_request("new", prompt_of(36, 2), greedy(2, ignore_eos=True), priority=0)
    outputs = run(engine)
    assert outputs["low"].metrics.num_preemptions == 0
    assert len(outputs) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_ends_its_request_in_the_scheduler_too(depth: int) -> None:
    engine = fake_engine(depth=depth)
    events: list[Event] = []
    engine.events.subscribe(events.append)
    prompt = prompt_of(6)
    letter = next(chr(t) for t in oracle(prompt, greedy(100, ignore_eos=True)) if 32 < t < 127)
    engine.add_request("a", prompt, greedy(200, ignore_eos=True, stop=[letter]))
    output = None
    while output is None:
        output = next((d.output for d in step(engine) if d.output is not None), None)
    assert output.outputs[0].stop_reason == letter
    assert "a" not in engine.scheduler
    assert engine.scheduler.cache.num_used_blocks == 0
    assert [event.reason for event in events if isinstance(event, Finished)] == ["stop"]
    run(engine)


def test_ids_of_choices_and_requests_are_kept_apart() -> None:
    engine = fake_engine()
    engine.add_request("a", prompt_of(4), SamplingParams(n=2, max_tokens=4))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("a#0", prompt_of(4), greedy(4))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("a", prompt_of(4), greedy(4))
    assert set(run(engine)) == {"a"}


def test_a_silent_abort_says_nothing_to_the_next_holder_of_the_id() -> None:
    engine = fake_engine()
    engine.add_request("a", prompt_of(4), greedy(30, ignore_eos=True))
    step(engine)
    engine.abort("a", silently=True)
    engine.add_request("a", prompt_of(4, 1), greedy(3, ignore_eos=True))
    assert run(engine)["a"].outputs[0].finish_reason == "length"


def test_without_chunked_prefill_a_step_stays_within_what_buffers_are_made_for() -> None:
    engine = fake_engine(enable_chunked_prefill=False, max_model_len=64, max_num_batched_tokens=64)
    for index in range(6):
        engine.add_request(str(index), prompt_of(2, index), greedy(30, ignore_eos=True))
    step(engine)
    engine.add_request("long", prompt_of(60, 9), greedy(2))
    run(engine)
    largest = max(batch.num_tokens for batch in engine.core.executor.batches)  # type: ignore[attr-defined]
    assert 64 < largest <= engine.config.max_step_tokens


class EqualKeys(FirstComeFirstServed):
    def key(self, request: Request) -> tuple[int, ...]:
        return (0,)


def test_a_policy_whose_keys_are_equal_runs_in_order_of_arrival() -> None:
    engine = fake_engine(
        scheduling_policy="tests.runtime.test_scheduler_edges:EqualKeys", max_num_seqs=1
    )
    order: list[str] = []
    engine.events.subscribe(
        lambda event: order.append(event.request_id) if isinstance(event, Finished) else None
    )
    generate(engine, [prompt_of(3, i) for i in range(4)], greedy(2))
    assert order == ["0", "1", "2", "3"]


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_of_one_prompt_compute_it_once(depth: int) -> None:
    engine = fake_engine(depth=depth, block_size=4, max_num_batched_tokens=16)
    events: list[Event] = []
    engine.events.subscribe(events.append)
    prompt = prompt_of(30)
    engine.add_request("a", prompt, greedy(6, n=4, ignore_eos=True))
    outputs = run(engine)["a"].outputs
    expected = oracle(prompt, greedy(6, ignore_eos=True))
    assert [choice.token_ids for choice in outputs] == [expected] * 4
    cached = [event.num_cached_tokens for event in events if isinstance(event, Admitted)]
    assert cached == [0, 28, 28, 28]
    prefills = [e for e in events if isinstance(e, ChunkScheduled) and e.num_computed_tokens < 30]
    assert sum(event.num_new_tokens for event in prefills) == 30 + 3 * 2


def test_who_waits_for_a_prefix_lets_others_pass_but_keeps_its_slot() -> None:
    engine = fake_engine(block_size=4, max_num_seqs=3)
    admitted: list[str] = []
    engine.events.subscribe(lambda event: admitted.append(event.request_id), Admitted)  # type: ignore[attr-defined]
    shared = prompt_of(20)
    prompts = {"first": shared, "same": [*shared, 1], "x": prompt_of(9, 1), "y": prompt_of(9, 2)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(9, ignore_eos=True))
    step(engine)
    assert admitted == ["first", "x"]
    step(engine)
    assert admitted == ["first", "x", "same"]
    outputs = run(engine)
    assert outputs["same"].num_cached_tokens == 20
    for name, prompt in prompts.items():
        expected = oracle(prompt, greedy(9, ignore_eos=True))
        assert outputs[name].outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("shared", "own", "waits"), [(8, 12, False), (12, 8, True), (256, 600, True), (252, 600, False)]
)
def test_only_a_prefix_that_is_worth_it_is_waited_for(shared: int, own: int, waits: bool) -> None:
    engine = fake_engine(
        block_size=4, max_num_batched_tokens=4096, max_model_len=1024, num_kv_blocks=1000
    )
    head = prompt_of(shared)
    engine.add_request("first", [*head, *prompt_of(own, 1)], greedy(3))
    engine.add_request("second", [*head, 1, *prompt_of(own, 2)], greedy(3))
    step(engine)
    (batch,) = engine.core.executor.batches  # type: ignore[attr-defined]
    assert len(batch.chunks) == (1 if waits else 2)
    assert run(engine)["second"].num_cached_tokens == (shared if waits else 0)


@pytest.mark.parametrize("failing", [False, True])
def test_who_waits_for_a_prefix_that_never_comes_computes_it(failing: bool) -> None:
    engine = fake_engine(block_size=4, max_num_batched_tokens=8)
    prompt = prompt_of(30)
    if failing:
        engine.core.executor.fail_at = {1}  # type: ignore[attr-defined]
    engine.add_request("first", prompt, greedy(5))
    engine.add_request("same", prompt, greedy(5))
    step(engine)
    if not failing:
        engine.abort("first")
    outputs = run(engine)
    assert outputs["first"].outputs[0].finish_reason == ("error" if failing else "abort")
    assert outputs["same"].outputs[0].token_ids == oracle(prompt, greedy(5))


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {}])
def test_nobody_waits_for_a_prefix_that_it_could_not_use(options: dict[str, bool]) -> None:
    """The cache is off, or the request needs the logits of each position."""
    engine = fake_engine(block_size=4, **options)
    asks = {} if options else {"prompt_logprobs": 0}
    engine.add_request("first", prompt_of(20), greedy(3))
    engine.add_request("same", prompt_of(20), greedy(3, **asks))
    step(engine)
    (batch,) = engine.core.executor.batches  # type: ignore[attr-defined]
    assert [chunk.request_id for chunk in batch.chunks] == ["first", "same"]
    run(engine)
