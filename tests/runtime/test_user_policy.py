"""A user's policy as ``module:Class``, also a careless one."""

import pytest

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
