"""A tiny random float32 model: token ids identical at every point of the lattice.

The oracle is the same model without batching, chunking, caching or preemption: one request at a
time, the whole prompt in one step.
"""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.events import Event, Preempted
from mini_infer.core.sampling_params import SamplingParams
from tests.runtime.engine_tools import generate, run
from tests.runtime.tiny_model import tiny_engine

PROMPTS = [
    [random.Random(seed).randrange(256) for _ in range(length)]
    for seed, length in enumerate([5, 33, 18, 1, 50])
]
PROMPTS.append(PROMPTS[1][:20] + PROMPTS[2])  # shares a prefix
PROMPTS.append(PROMPTS[1])  # the same again
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, seed=11, max_tokens=10),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=3, max_tokens=14),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=9),
    SamplingParams(temperature=1.0, seed=5, presence_penalty=0.5, min_p=0.02, max_tokens=8),
    SamplingParams(temperature=0.0, min_tokens=6, max_tokens=12, logit_bias={65: 3.0}),
    SamplingParams(temperature=0.0, max_tokens=12),
]


@functools.cache
def alone() -> tuple[tuple[int, ...], ...]:
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine = tiny_engine(enable_prefix_caching=False, max_num_batched_tokens=256, block_size=16)
        outputs.append(tuple(generate(engine, [prompt], params)[0]))
    return tuple(outputs)


@settings(max_examples=40, deadline=None)
@given(
    chunk=st.sampled_from([1, 3, 16, 256]),
    caching=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    forced_preemption=st.booleans(),
    depth=st.sampled_from([1, 2]),
    policy=st.sampled_from(["fcfs", "priority"]),
    order=st.permutations(range(len(PROMPTS))),
    seqs=st.sampled_from([2, 8]),
)
def test_token_ids_are_identical_at_every_point(
    chunk: int,
    caching: bool,
    block_size: int,
    forced_preemption: bool,
    depth: int,
    policy: str,
    order: list[int],
    seqs: int,
) -> None:
    engine = tiny_engine(
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
        block_size=block_size,
        # 67 tokens: the longest request fits, two long ones do not.
        num_kv_blocks=(68 if forced_preemption else 1024) // block_size + forced_preemption,
        depth=depth,
        scheduling_policy=policy,
        max_num_seqs=seqs,
    )
    outputs = generate(
        engine,
        [PROMPTS[index] for index in order],
        [PARAMS[index] for index in order],
        priorities=[index % 3 for index in order],
    )
    assert [tuple(output) for output in outputs] == [alone()[index] for index in order]


def test_the_lattices_small_pool_does_preempt() -> None:
    engine = tiny_engine(num_kv_blocks=18, block_size=4)
    events: list[Event] = []
    engine.events.subscribe(events.append)
    generate(engine, PROMPTS, PARAMS)
    assert any(isinstance(event, Preempted) for event in events)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_regression_05_a_fully_cached_prompt_gives_the_same_output(
    caching: bool, block_size: int
) -> None:
    engine = tiny_engine(enable_prefix_caching=caching, block_size=block_size)
    prompt = PROMPTS[4][:32]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    first = generate(engine, [prompt], params)
    engine.add_request("second", prompt, params)
    second = run(engine)["second"]
    assert [second.outputs[0].token_ids] == first
    # All but the last block of 32 tokens, or but the last token.
    assert second.num_cached_tokens == (32 - block_size if caching else 0)


def test_regression_06_a_stale_entry_is_a_miss_and_the_output_is_the_cold_one() -> None:
    engine = tiny_engine(num_kv_blocks=4, block_size=16)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    x, y = PROMPTS[1], PROMPTS[4]
    cold = generate(engine, [x], params)
    generate(engine, [y], params)
    engine.add_request("again", x, params)
    again = run(engine)["again"]
    assert again.num_cached_tokens == 0
    assert [again.outputs[0].token_ids] == cold


def test_regression_10_a_seeded_request_is_the_same_beside_any_neighbour() -> None:
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=10)
    expected = generate(tiny_engine(), [PROMPTS[0]], seeded)[0]
    neighbours = [
        SamplingParams(temperature=1.0, max_tokens=10),
        SamplingParams(temperature=1.0, repetition_penalty=2.0, max_tokens=10),
        SamplingParams(temperature=1.0, top_k=1, seed=99, max_tokens=10),
    ]
    for neighbour in neighbours:
        for ours in (0, 1):
            pair = [(PROMPTS[2], neighbour)]
            pair.insert(ours, (PROMPTS[0], seeded))
            outputs = generate(tiny_engine(), [p for p, _ in pair], [q for _, q in pair])
            assert outputs[ours] == expected


@pytest.mark.parametrize("caching", [False, True])
def test_regression_10_a_penalty_counts_prompt_tokens_cached_or_not(caching: bool) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.8, max_tokens=10)
    engine = tiny_engine(enable_prefix_caching=caching, block_size=4)
    first = generate(engine, [PROMPTS[1]], params)
    second = generate(engine, [PROMPTS[1]], params)
    assert first == second


@pytest.mark.parametrize("chunk", [1, 3, 16, 256])
def test_prompt_logprobs_do_not_depend_on_chunking(chunk: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, logprobs=1)

    def rows(chunk_size: int) -> list[tuple[int, float]]:
        engine = tiny_engine(max_num_batched_tokens=chunk_size)
        engine.add_request("a", PROMPTS[2], params)
        engine.add_request("b", PROMPTS[1], SamplingParams(max_tokens=4))
        output = run(engine)["a"]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(PROMPTS[2])
        return [
            (token, round(entry[token].logprob, 4))
            for token, entry in zip(PROMPTS[2][1:], output.prompt_logprobs[1:], strict=True)
            if entry is not None
        ]

    assert rows(chunk) == rows(256)


def test_logprobs_of_a_greedy_token_have_rank_one() -> None:
    engine = tiny_engine()
    engine.add_request("a", PROMPTS[0], SamplingParams(temperature=0, logprobs=3, max_tokens=5))
    choice = run(engine)["a"].outputs[0]
    assert choice.logprobs is not None
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry[token_id].rank == 1
        assert len(entry) == 3
    assert choice.cumulative_logprob == pytest.approx(
        sum(entry[t].logprob for t, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    )


def test_an_engine_seed_makes_unseeded_requests_repeatable() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10)
    assert generate(tiny_engine(), [PROMPTS[0]], params) == generate(
        tiny_engine(), [PROMPTS[0]], params
    )


def test_choices_of_one_request_differ_and_repeat_with_a_seed() -> None:
    def choices() -> list[list[int]]:
        engine = tiny_engine()
        engine.add_request("a", PROMPTS[0], SamplingParams(n=3, seed=1, max_tokens=10))
        return [choice.token_ids for choice in run(engine)["a"].outputs]

    first = choices()
    assert first == choices()
    assert len({tuple(c) for c in first}) == 3


def test_a_model_that_raises_ends_its_requests_and_the_next_ones_are_served() -> None:
    engine = tiny_engine()
    model = engine.core.executor._runner.model  # type: ignore[attr-defined]
    expected = generate(engine, [PROMPTS[0]], PARAMS[0])
    original = model.compute_logits
    model.compute_logits = lambda hidden: 1 / 0
    engine.add_request("bad", PROMPTS[1], PARAMS[0])
    assert run(engine)["bad"].outputs[0].finish_reason == "error"
    model.compute_logits = original
    assert generate(engine, [PROMPTS[0]], PARAMS[0]) == expected


def test_a_step_that_fails_while_it_admits_leaves_no_trace_in_the_cache() -> None:
    """At depth 2 a later step must not run on a slot whose admission never reached the device."""
    shared = PROMPTS[4]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    cold = generate(tiny_engine(depth=2, block_size=4), [shared], params)
    engine = tiny_engine(depth=2, block_size=4, max_num_seqs=1)
    generate(engine, [shared], params)
    state = engine.core.executor._runner.state  # type: ignore[attr-defined]
    original, calls = state.take_in, []

    def failing(batch: object) -> None:
        calls.append(batch)
        raise RuntimeError("the device is out of memory")

    state.take_in = failing
    engine.add_request("x", PROMPTS[1], params)
    assert run(engine)["x"].outputs[0].finish_reason == "error"
    assert len(calls) == 1
    state.take_in = original
    engine.add_request("again", shared, params)
    again = run(engine)["again"]
    assert again.num_cached_tokens > 0
    assert [again.outputs[0].token_ids] == cold
