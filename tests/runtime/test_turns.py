"""Steps of a pipeline, as the scheduler plans them: who is in which, and what is known by then."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.batch import IN_FLIGHT, ScheduledBatch
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.runtime.engine import LLMEngine
from tests.runtime.engine_tools import engine_with, generate, greedy, run, step
from tests.runtime.fake_executor import FakeExecutor, LazyResult, make_config
from tests.runtime.test_scheduler import oracle, prompt_of, workloads


class FakeStages(FakeExecutor):
    """Checks what stages rely on, before each step."""

    def step_costs(self) -> None:
        pass

    def submit(self, batch: ScheduledBatch) -> LazyResult:
        in_flight = self.batches[self.num_read :]
        num_behind = self.config.pipeline_parallel_size - 1
        behind = {c.slot for other in in_flight[-num_behind:] for c in other.chunks if c.samples}
        tokens = {a.slot: list(a.token_ids) for a in batch.admissions}
        assert len(batch.first_token_ids) == len(batch.chunks)
        gaps = []
        for chunk, first in zip(batch.chunks, batch.first_token_ids, strict=True):
            if first != IN_FLIGHT:
                table = tokens.get(chunk.slot) or self._tokens[chunk.slot]
                assert first == table[chunk.num_computed_tokens]
            else:
                sampled = [c.slot for other in in_flight for c in other.chunks if c.samples]
                assert chunk.slot in sampled, "the host knows it"
                assert self.config.feeds_tokens_back
                gaps.append(chunk.slot in behind)
        assert not any(gaps) or len(gaps) == len(batch.chunks), "others could have gone first"
        return super().submit(batch)


def stages(num_stages: int, **options: object) -> LLMEngine:
    limits = {"pipeline_parallel_size": num_stages, "distributed_executor_backend": "mp"}
    config = make_config(**({"depth": num_stages + 1} | limits | options))
    return engine_with(FakeStages(config), **({"depth": num_stages + 1} | limits | options))


def batches_of(engine: LLMEngine) -> list[ScheduledBatch]:
    executor = engine.core.executor
    assert isinstance(executor, FakeStages)
    return executor.batches


@settings(max_examples=120, deadline=None)
@given(
    workload=workloads(),
    num_stages=st.sampled_from([2, 3, 4]),
    budget=st.sampled_from([1, 3, 16, 256]),
    block_size=st.sampled_from([1, 4, 16]),
    caching=st.booleans(),
    depth=st.sampled_from([1, 2, 3, 5]),
    policy=st.sampled_from(["fcfs", "priority"]),
    seqs=st.sampled_from([1, 3, 8]),
    spare=st.integers(0, 12),
)
def test_output_is_the_oracles_at_every_point_of_the_lattice(
    workload: tuple[list[list[int]], list[int], list[int]],
    num_stages: int,
    budget: int,
    block_size: int,
    caching: bool,
    depth: int,
    policy: str,
    seqs: int,
    spare: int,
) -> None:
    prompts, lengths, priorities = workload
    longest = max(len(p) + n - 1 for p, n in zip(prompts, lengths, strict=True))
    engine = stages(
        num_stages,
        max_num_batched_tokens=budget,
        block_size=block_size,
        enable_prefix_caching=caching,
        depth=depth,
        scheduling_policy=policy,
        max_num_seqs=seqs,
        num_kv_blocks=-(-(longest + 1) // block_size) + spare // block_size,
    )
    params = [greedy(n) for n in lengths]
    outputs = generate(engine, prompts, params, priorities)
    assert outputs == [oracle(p, q) for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_groups_take_turns(num_stages: int, count: int) -> None:
    """Each has its share, and none gets ahead."""
    engine = stages(num_stages, max_num_batched_tokens=256)
    for index in range(count):
        params = greedy(40, ignore_eos=True)
        engine.add_request(str(index), prompt_of(5, index), params)
    for _ in range(60):
        step(engine)
    decodes = [batch for batch in batches_of(engine) if not batch.admissions][:60]
    assert max(len(batch.chunks) for batch in decodes) == -(-count // num_stages)
    turns = Counter(chunk.request_id for batch in decodes[:30] for chunk in batch.chunks)
    assert max(turns.values()) - min(turns.values()) <= 2
    run(engine)


def test_a_group_that_shrinks_gets_others() -> None:
    engine = stages(2, max_num_batched_tokens=256)
    for index in range(8):  # those of one group are short
        params = greedy(6 if index < 4 else 40, ignore_eos=True)
        engine.add_request(str(index), prompt_of(5, index), params)
    run(engine)
    late = batches_of(engine)[-20:-4]
    assert {len(batch.chunks) for batch in late} == {2}


def test_a_prompts_chunks_follow_each_other() -> None:
    """They need no token, so each stage has one of them."""
    engine = stages(3, max_num_batched_tokens=16)
    engine.add_request("long", prompt_of(100), greedy(2))
    step(engine)
    starts = [batch.chunks[0].num_computed_tokens for batch in batches_of(engine)]
    assert starts == [0, 16, 32, 48]
    run(engine)


def test_a_lone_request_waits_for_stages_and_not_for_the_host() -> None:
    engine = stages(2)
    engine.add_request("lone", prompt_of(5), greedy(8, ignore_eos=True))
    step(engine)
    firsts = [batch.first_token_ids for batch in batches_of(engine)]
    assert firsts[1:] == [(IN_FLIGHT,), (IN_FLIGHT,)]
    run(engine)
    assert sum(chunk.samples for batch in batches_of(engine) for chunk in batch.chunks) == 8


def test_with_drafts_tokens_are_known() -> None:
    """The fake model verifies none, and all of its proposals come late or never."""
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    engine = stages(2, depth=2, speculative_config=ngram)
    assert not engine.config.feeds_tokens_back
    for index in range(5):
        engine.add_request(str(index), prompt_of(5, index), greedy(3, ignore_eos=True))
    run(engine)
    assert all(IN_FLIGHT not in batch.first_token_ids for batch in batches_of(engine))
