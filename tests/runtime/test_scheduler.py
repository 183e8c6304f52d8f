"""The scheduler over a fake executor whose output depends on every cached token."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.errors import InvalidConfigError, PromptTooLongError
from mini_infer.core.events import Admitted, ChunkScheduled, Event, Finished, Preempted, Resumed
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.policy import FirstComeFirstServed, load_policy
from tests.runtime.engine_tools import fake_engine, generate, greedy, run, step
from tests.runtime.fake_executor import expected_output, make_config

EOS = frozenset({257})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def oracle(prompt: list[int], params: SamplingParams) -> list[int]:
    assert params.max_tokens is not None
    eos = frozenset() if params.ignore_eos else EOS
    return expected_output(prompt, params.max_tokens, eos)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Prompts that share prefixes, their output lengths, and priorities."""
    head = prompt_of(40, seed=7)
    count = draw(st.integers(1, 7))
    prompts = []
    for _ in range(count):
        shared = draw(st.integers(0, 24))
        own = draw(st.integers(1, 16))
        prompts.append(head[:shared] + prompt_of(own, seed=draw(st.integers(0, 5))))
    lengths = draw(st.lists(st.integers(1, 14), min_size=count, max_size=count))
    priorities = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return prompts, lengths, priorities


@settings(max_examples=250, deadline=None)
@given(
    workload=workloads(),
    budget=st.sampled_from([1, 3, 16, 256]),
    block_size=st.sampled_from([1, 4, 16]),
    caching=st.booleans(),
    depth=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["fcfs", "priority"]),
    seqs=st.sampled_from([1, 3, 8]),
    spare=st.integers(0, 12),
    stream=st.booleans(),
)
def test_output_is_the_oracles_at_every_point_of_the_lattice(
    workload: tuple[list[list[int]], list[int], list[int]],
    budget: int,
    block_size: int,
    caching: bool,
    depth: int,
    policy: str,
    seqs: int,
    spare: int,
    stream: bool,
) -> None:
    prompts, lengths, priorities = workload
    longest = max(len(p) + n - 1 for p, n in zip(prompts, lengths, strict=True))
    engine = fake_engine(
        max_num_batched_tokens=budget,
        block_size=block_size,
        enable_prefix_caching=caching,
        depth=depth,
        scheduling_policy=policy,
        max_num_seqs=seqs,
        num_kv_blocks=-(-(longest + 1) // block_size) + spare // block_size,
    )
    params = [greedy(n) for n in lengths]
    outputs = generate(engine, prompts, params, priorities, stream)
    assert outputs == [oracle(p, q) for p, q in zip(prompts, params, strict=True)]


def test_without_chunked_prefill_every_prompt_runs_whole() -> None:
    engine = fake_engine(
        enable_chunked_prefill=False, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=8
    )
    events: list[Event] = []
    engine.events.subscribe(events.append)
    prompts = [prompt_of(50 - index, index) for index in range(8)]
    outputs = generate(engine, prompts, greedy(10))
    assert outputs == [oracle(p, greedy(10)) for p in prompts]
    prefills = [e for e in events if isinstance(e, ChunkScheduled) and e.num_new_tokens > 1]
    assert sorted(e.num_new_tokens for e in prefills) == sorted(map(len, prompts))


def test_a_step_never_exceeds_its_token_budget() -> None:
    engine = fake_engine(max_num_batched_tokens=7)
    generate(engine, [prompt_of(30, i) for i in range(5)], greedy(5))
    executor = engine.core.executor
    assert max(batch.num_tokens for batch in executor.batches) <= 7  # type: ignore[attr-defined]


def test_decoding_requests_go_first_and_are_never_delayed_by_a_long_prompt() -> None:
    engine = fake_engine(max_num_batched_tokens=8, enable_prefix_caching=False)
    engine.add_request("short", prompt_of(4), greedy(20, ignore_eos=True))
    step(engine)
    engine.add_request("long", prompt_of(100, 1), greedy(2))
    for _ in range(10):
        new = [d for d in step(engine) if d.request_id == "short"]
        assert sum(len(d.token_ids) for d in new) == 1
    run(engine)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_reach_the_depth_and_not_more(depth: int) -> None:
    engine = fake_engine(depth=depth)
    generate(engine, [prompt_of(9, i) for i in range(4)], greedy(12, ignore_eos=True))
    assert engine.core.executor.max_in_flight == depth  # type: ignore[attr-defined]


def test_depth_two_does_not_run_past_the_last_token() -> None:
    engine = fake_engine(depth=2)
    generate(engine, [prompt_of(5)], greedy(6, ignore_eos=True))
    batches = engine.core.executor.batches  # type: ignore[attr-defined]
    assert sum(chunk.samples for batch in batches for chunk in batch.chunks) == 6


def test_preempted_requests_resume_and_say_so() -> None:
    engine = fake_engine(num_kv_blocks=10, block_size=4)
    events: list[Event] = []
    engine.events.subscribe(events.append)
    prompts = [prompt_of(12, i) for i in range(3)]
    outputs = generate(engine, prompts, greedy(20, ignore_eos=True))
    assert outputs == [oracle(p, greedy(20, ignore_eos=True)) for p in prompts]
    preempted = [e.request_id for e in events if isinstance(e, Preempted)]
    assert preempted
    assert len([e for e in events if isinstance(e, Resumed)]) == len(preempted)
    assert len([e for e in events if isinstance(e, Admitted)]) == 3


def test_the_oldest_request_is_never_preempted() -> None:
    engine = fake_engine(num_kv_blocks=9, block_size=4)
    events: list[Event] = []
    engine.events.subscribe(events.append)
    generate(engine, [prompt_of(10, i) for i in range(6)], greedy(24, ignore_eos=True))
    assert "0" not in {e.request_id for e in events if isinstance(e, Preempted)}
    assert next(e.request_id for e in events if isinstance(e, Finished)) == "0"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_newcomer_of_higher_priority_displaces_a_running_request(depth: int) -> None:
    engine = fake_engine(scheduling_policy="priority", max_num_seqs=1, depth=depth)
    order: list[str] = []
    engine.events.subscribe(
        lambda event: order.append(event.request_id) if isinstance(event, Finished) else None
    )
    engine.add_request("low", prompt_of(6), greedy(30, ignore_eos=True), priority=5)
    for _ in range(4):
        step(engine)
    engine.add_request("high", prompt_of(6, 1), greedy(3, ignore_eos=True), priority=1)
    outputs = run(engine)
    assert order == ["high", "low"]
    assert outputs["low"].metrics.num_preemptions == 1
    assert outputs["low"].outputs[0].token_ids == oracle(prompt_of(6), greedy(30, ignore_eos=True))


class ShortestPromptFirst(FirstComeFirstServed):
    """A user's policy, as a README would show it."""

    def key(self, request: Request) -> tuple[int, ...]:
        return (request.num_prompt_tokens, request.arrival)


def test_a_users_policy_is_loaded_by_name() -> None:
    engine = fake_engine(
        scheduling_policy="tests.runtime.test_scheduler:ShortestPromptFirst", max_num_seqs=1
    )
    order: list[str] = []
    engine.events.subscribe(
        lambda event: order.append(event.request_id) if isinstance(event, Finished) else None
    )
    generate(engine, [prompt_of(9), prompt_of(7), prompt_of(3), prompt_of(5)], greedy(2))
    assert order == ["2", "3", "1", "0"]


@pytest.mark.parametrize(
    "name",
    ["lifo", "no_such_module:Policy", "tests.runtime.test_scheduler:NoSuch", "json:JSONDecoder"],
)
def test_a_policy_that_cannot_be_loaded_is_a_clear_error(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=name):
        load_policy(name)


def test_more_requests_than_slots_all_finish() -> None:
    engine = fake_engine(max_num_seqs=2)
    prompts = [prompt_of(5, i) for i in range(20)]
    assert generate(engine, prompts, greedy(4)) == [oracle(p, greedy(4)) for p in prompts]


def test_a_request_that_can_never_fit_is_refused_and_others_go_on() -> None:
    engine = fake_engine(num_kv_blocks=4, block_size=4, max_model_len=256)
    engine.add_request("ok", prompt_of(6), greedy(4))
    with pytest.raises(PromptTooLongError):
        engine.add_request("huge", prompt_of(40), greedy(4))
    assert list(run(engine)) == ["ok"]


def test_two_thousand_random_requests_with_aborts_leave_no_block_referenced() -> None:
    rng = random.Random(0)
    engine = fake_engine(
        num_kv_blocks=24, max_num_batched_tokens=24, max_num_seqs=6, depth=2, max_model_len=64
    )
    expected: dict[str, list[int]] = {}
    live: list[str] = []
    finished = added = aborted = 0
    while finished + aborted < 2000:
        while added < 2000 and len(live) < 12:
            prompt = prompt_of(rng.randrange(1, 40), rng.randrange(20))
            params = greedy(rng.randrange(1, 20))
            engine.add_request(str(added), prompt, params)
            expected[str(added)] = oracle(prompt, params)
            live.append(str(added))
            added += 1
        if rng.random() < 0.15 and live:
            victim = live.pop(rng.randrange(len(live)))
            engine.abort(victim)
            aborted += 1
        for delta in step(engine):
            if delta.output is None or delta.request_id not in live:
                continue
            live.remove(delta.request_id)
            finished += 1
            assert delta.output.outputs[0].token_ids == expected[delta.request_id]
    assert aborted > 100
    assert run(engine) == {}
    assert engine.scheduler.cache.num_used_blocks == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_moment_frees_everything(depth: int, steps: int) -> None:
    engine = fake_engine(depth=depth, max_num_batched_tokens=6)
    engine.add_request("a", prompt_of(20), greedy(10))
    engine.add_request("b", prompt_of(9, 1), greedy(10))
    for _ in range(steps):
        step(engine)
    engine.abort("a")
    outputs = run(engine)
    assert outputs["a"].outputs[0].finish_reason == "abort"
    assert outputs["b"].outputs[0].token_ids == oracle(prompt_of(9, 1), greedy(10))


@pytest.mark.parametrize("depth", [1, 2])
def test_an_id_can_be_used_again_while_its_aborted_step_is_in_flight(depth: int) -> None:
    engine = fake_engine(depth=depth)
    engine.add_request("a", prompt_of(8), greedy(20))
    step(engine)
    step(engine)
    engine.abort("a")
    engine.add_request("a", prompt_of(8, 3), greedy(5))
    outputs = [d.output for _ in range(40) for d in step(engine) if d.output is not None]
    assert next(o.outputs[0].finish_reason for o in outputs if o) == "abort"
    assert outputs[-1] is not None
    assert outputs[-1].outputs[0].token_ids == oracle(prompt_of(8, 3), greedy(5))


def test_an_id_in_use_is_refused() -> None:
    engine = fake_engine()
    engine.add_request("a", prompt_of(3), greedy(5))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("a", prompt_of(3), greedy(5))
    run(engine)


def test_aborting_an_unknown_id_is_no_error() -> None:
    engine = fake_engine()
    engine.abort("nobody")
    assert run(engine) == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_raises_once_ends_nobody(depth: int) -> None:
    engine = fake_engine(depth=depth, max_num_seqs=2)
    engine.core.executor.fail_at = {3}  # type: ignore[attr-defined]
    params = greedy(9, ignore_eos=True)
    prompts = [prompt_of(5, index) for index in range(4)]
    assert generate(engine, prompts, params) == [oracle(prompt, params) for prompt in prompts]


def test_chunks_of_a_step_are_in_policy_order() -> None:
    engine = fake_engine(scheduling_policy="priority")
    for index, priority in enumerate([3, 1, 2, 0]):
        engine.add_request(str(index), prompt_of(4, index), greedy(3), priority=priority)
    step(engine)
    batch = engine.core.executor.batches[0]  # type: ignore[attr-defined]
    assert [chunk.request_id for chunk in batch.chunks] == ["3", "1", "2", "0"]
    run(engine)


def test_an_unfinished_chunk_neither_samples_nor_streams__regression_18() -> None:
    engine = fake_engine(max_num_batched_tokens=5)
    engine.add_request("a", prompt_of(18), greedy(3))
    deltas = [step(engine) for _ in range(3)]
    assert deltas == [[], [], []]
    assert [chunk.samples for b in engine.core.executor.batches for chunk in b.chunks] == [
        False
    ] * 3  # type: ignore[attr-defined]
    run(engine)


def test_regression_07_a_pool_of_two_blocks_refuses_what_needs_three() -> None:
    engine = fake_engine(num_kv_blocks=2, block_size=4)
    with pytest.raises(PromptTooLongError):
        engine.add_request("a", prompt_of(8), greedy(4))
    engine.add_request("b", prompt_of(4), greedy(4))
    assert list(run(engine)) == ["b"]


def test_regression_07_max_tokens_none_is_clipped_to_the_pool() -> None:
    engine = fake_engine(num_kv_blocks=2, block_size=4)
    engine.add_request(
        "a", prompt_of(6), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )
    output = run(engine)["a"].outputs[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 3  # the last one needs no KV


def test_regression_08_token_counts_are_taken_after_the_look_up() -> None:
    engine = fake_engine(num_kv_blocks=12, block_size=4, max_num_seqs=3)
    events: list[Event] = []
    engine.events.subscribe(events.append)
    shared = prompt_of(8, 5)
    prompts = [shared + prompt_of(4, i) for i in range(3)]
    outputs = generate(engine, prompts, greedy(18, ignore_eos=True))
    assert outputs == [oracle(p, greedy(18, ignore_eos=True)) for p in prompts]
    assert any(e.num_cached_tokens > 0 for e in events if isinstance(e, Resumed))


def test_regression_11_abort_with_two_choices_stops_both_and_frees_every_block() -> None:
    engine = fake_engine()
    engine.add_request("a", prompt_of(9), SamplingParams(n=2, max_tokens=30, ignore_eos=True))
    step(engine)
    step(engine)
    engine.abort("a")
    outputs = run(engine)
    assert [c.finish_reason for c in outputs["a"].outputs] == ["abort", "abort"]
    assert engine.scheduler.cache.num_used_blocks == 0


def test_regression_12_abort_during_a_chunked_prefill_keeps_shared_blocks_whole() -> None:
    engine = fake_engine(max_num_batched_tokens=6, depth=2)
    shared = prompt_of(24, 9)
    first = generate(engine, [shared], greedy(3))
    engine.add_request("x", [*shared, *prompt_of(30, 1)], greedy(3))
    step(engine)
    engine.add_request("y", [*shared, *prompt_of(5, 2)], greedy(4))
    step(engine)
    engine.abort("x")
    outputs = run(engine)
    assert outputs["y"].outputs[0].token_ids == oracle([*shared, *prompt_of(5, 2)], greedy(4))
    assert outputs["y"].num_cached_tokens > 0
    assert generate(engine, [shared], greedy(3)) == first


def test_regression_16_rows_come_in_arrival_order() -> None:
    engine = fake_engine()
    for name in ("zeta", "alpha", "mid"):
        engine.add_request(name, prompt_of(4), greedy(4, ignore_eos=True))
    run(engine)
    for batch in engine.core.executor.batches:  # type: ignore[attr-defined]
        assert [chunk.request_id for chunk in batch.chunks] == ["zeta", "alpha", "mid"]


def test_config_rejects_whole_prompts_that_exceed_a_step() -> None:
    with pytest.raises(InvalidConfigError, match="max_num_batched_tokens"):
        make_config(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=128)


@pytest.mark.parametrize(
    "option", ["max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "depth"]
)
def test_config_rejects_zero(option: str) -> None:
    with pytest.raises(InvalidConfigError, match=option):
        make_config(**{option: 0})
