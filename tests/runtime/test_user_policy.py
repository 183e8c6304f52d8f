"""A user's policy as ``module:Class``, also a careless one."""

from collections.abc import Sequence

import pytest

from mini_infer import LLM
from mini_infer.core.errors import PolicyError, StepError
from mini_infer.core.outputs import CompletionOutput
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.policy import FirstComeFirstServed


class Careless(FirstComeFirstServed):
    """Everybody is equal."""

    def key(self, request: Request) -> tuple[int, ...]:
        return (0,)


@pytest.mark.parametrize("depth", [1, 2])
def test_equal_keys_neither_fail_nor_wait_for_ever(depth: int) -> None:
    engine = LLMEngine.from_options(
        dry_run=True,
        scheduling_policy=f"{__name__}:Careless",
        num_kv_blocks=8,
        block_size=4,
        max_num_seqs=4,
        depth=depth,
    )
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for index in range(6):
        engine.add_request(f"r{index}", [index + 1] * 10, params)
    finished = []
    for _ in range(1000):
        finished += [delta.request_id for delta in engine.step() if delta.output]
        engine.scheduler.cache.check_invariants()
        if not engine.has_unfinished():
            break
    assert sorted(finished) == [f"r{index}" for index in range(6)]
    assert engine.scheduler.cache.num_used_blocks == 0


class NoKey(FirstComeFirstServed):
    """Fails on requests of priority 1, and answers nonsense for those above."""

    def key(self, request: Request) -> tuple[float, ...]:
        if request.priority == 1:
            raise ZeroDivisionError("as told")
        return {0: (0,), 2: None, 3: ("a",), 4: (float("nan"),)}[request.priority]  # type: ignore[return-value]


class NoVictim(FirstComeFirstServed):
    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        raise KeyError("as told")


class StrangeVictim(FirstComeFirstServed):
    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        return None  # type: ignore[return-value]


class LastOfAllFirst(FirstComeFirstServed):
    def key(self, request: Request) -> tuple[float, ...]:
        return (-request.arrival,)

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        raise KeyError("as told")


class Undecided:
    """Like an array of several elements."""

    def __bool__(self) -> bool:
        raise ValueError("as told")


class DisplacesPerhaps(LastOfAllFirst):
    def may_displace(self, newcomer: Request, running: Request) -> bool:
        return Undecided()  # type: ignore[return-value]


class Displaces(LastOfAllFirst):
    """The newest goes first; whoever waits may displace anybody, also one that ranks before it."""

    def may_displace(self, newcomer: Request, running: Request) -> bool:
        return True


PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


def engine_of(policy: type, **options: object) -> LLMEngine:
    shape = {"num_kv_blocks": 8, "block_size": 4, "max_num_seqs": 4} | options
    return LLMEngine.from_options(
        dry_run=True, scheduling_policy=f"{__name__}:{policy.__name__}", **shape
    )


def finish(engine: LLMEngine) -> dict[str, CompletionOutput]:
    outputs = {}
    for _ in range(1000):
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output.outputs[0]
        engine.scheduler.cache.check_invariants()
        if not engine.has_unfinished():
            assert engine.scheduler.cache.num_used_blocks == 0
            return outputs
    raise AssertionError("not finished")


@pytest.mark.parametrize("priority", [1, 2, 3, 4])
def test_a_request_without_a_key_is_refused_and_others_go_on(priority: int) -> None:
    engine = engine_of(NoKey)
    engine.add_request("good", [1] * 6, PARAMS)
    with pytest.raises(PolicyError, match=r"test_user_policy:NoKey, method key\(\)"):
        engine.add_request("bad", [2] * 6, PARAMS, priority=priority)
    engine.add_request("too", [3] * 6, PARAMS)
    assert finish(engine).keys() == {"good", "too"}
    engine.add_request("bad", [2] * 6, PARAMS)  # its id is free
    assert finish(engine).keys() == {"bad"}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", [NoVictim, StrangeVictim])
def test_a_policy_that_names_no_victim_fails_the_request_that_needs_the_blocks(
    policy: type, depth: int
) -> None:
    engine = engine_of(policy, depth=depth)
    for index in range(4):
        engine.add_request(str(index), [index + 1] * 7, PARAMS)
    outputs = finish(engine)
    failed = [output for output in outputs.values() if output.finish_reason == "error"]
    assert len(outputs) == 4
    assert 0 < len(failed) < 4
    for output in failed:
        assert f"{policy.__name__}, method choose_victim()" in str(output.stop_reason)
    engine.add_request("next", [9] * 7, PARAMS)
    assert finish(engine)["next"].finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_that_fails_on_a_newcomer_fails_that_one(depth: int) -> None:
    engine = engine_of(LastOfAllFirst, depth=depth, max_num_seqs=1)
    engine.add_request("runs", [1] * 6, PARAMS)
    engine.step()
    engine.add_request("new", [2] * 6, PARAMS)
    outputs = finish(engine)
    assert outputs["runs"].finish_reason == "length"
    assert outputs["new"].finish_reason == "error"
    assert outputs["new"].stop_reason == (
        f"scheduling policy {__name__}:LastOfAllFirst, method may_displace(): "
        "it raised KeyError: 'as told'"
    )


def test_an_answer_that_is_neither_true_nor_false_fails_the_newcomer() -> None:
    engine = engine_of(DisplacesPerhaps, max_num_seqs=1)
    engine.add_request("runs", [1] * 6, PARAMS)
    engine.step()
    engine.add_request("new", [2] * 6, PARAMS)
    outputs = finish(engine)
    assert outputs["runs"].finish_reason == "length"
    assert str(outputs["new"].stop_reason).endswith("it must return True or False")


def test_a_failure_is_told_when_nothing_else_runs() -> None:
    """The only running request is the one that fails: no step is left to bring the news."""
    engine = engine_of(NoVictim, depth=1, num_kv_blocks=6)
    engine.add_request("a", [1] * 7, PARAMS)
    engine.add_request("b", [2] * 7, PARAMS)
    assert finish(engine).keys() == {"a", "b"}


@pytest.mark.parametrize("depth", [1, 2])
def test_two_requests_can_not_displace_each_other_for_ever(depth: int) -> None:
    engine = engine_of(Displaces, depth=depth, max_num_seqs=1)
    for index in range(4):
        engine.add_request(str(index), [index + 1] * 6, PARAMS)
        engine.step()
    assert {output.finish_reason for output in finish(engine).values()} == {"length"}


def test_llm_tells_a_policys_failure_as_a_typed_error() -> None:
    options = {"num_kv_blocks": 8, "block_size": 4, "max_num_seqs": 4}
    with LLM(dry_run=True, scheduling_policy=f"{__name__}:NoVictim", **options) as llm:
        with pytest.raises(StepError, match=r"request-\d+: scheduling policy .*NoVictim"):
            llm.generate([[index + 1] * 7 for index in range(4)], PARAMS, use_tqdm=False)
        assert llm.generate([[1] * 7], PARAMS, use_tqdm=False)[0].finished
