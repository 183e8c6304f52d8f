"""Stages as processes: the same tokens as one process at every point of the lattice, and faults
that end in a clear error, within seconds, with nothing left behind."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.errors import EngineDeadError
from mini_infer.runtime import mp_executor, rank_processes
from mini_infer.runtime import ranks as watched
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.mp_executor import MultiProcessExecutor
from tests.runtime.engine_tools import generate, greedy, run
from tests.runtime.fake_executor import make_config
from tests.runtime.faulty_stages import FAIL, FATAL_TOKEN, FAULT, FAULTY_RANK, LOOP
from tests.runtime.test_mp_executor import LIMIT, NOTHING, PROMPT, assert_gone
from tests.runtime.test_mp_lattice import Lasting
from tests.runtime.test_pipeline_parallel import MODELS, alone
from tests.runtime.test_tensor_parallel import PARAMS, PROMPTS, assert_same
from tests.runtime.tiny_model import tiny_engine

pytestmark = pytest.mark.processes

NAME = "qwen2-tied"
NUM_BLOCKS = 256
FATAL = [FATAL_TOKEN, 5, 6]
PROGRAM = rank_processes.PROGRAM.replace(
    "mini_infer.runtime.rank_worker import main; main()",
    "tests.runtime.faulty_stages import faulty_main; faulty_main()",
)


def pipeline(size: tuple[int, int], **options: Any) -> MultiProcessExecutor:
    """``size``: stages, and ranks in each."""
    config = make_config(
        pipeline_parallel_size=size[0],
        tensor_parallel_size=size[1],
        distributed_executor_backend="mp",
        **options,
    )
    return MultiProcessExecutor(config, NOTHING)


@pytest.fixture(scope="module")
def ranks() -> Iterator[MultiProcessExecutor]:
    """Four, in two stages."""
    limits = {"num_kv_blocks": NUM_BLOCKS, "max_num_batched_tokens": 256}
    ranks = pipeline((2, 2), model_config=MODELS[NAME], depth=3, **limits)
    assert ranks.start() == NUM_BLOCKS
    yield ranks
    ranks.shutdown()
    assert not ranks.ranks.folder.exists()  # type: ignore[attr-defined]


@settings(max_examples=5, deadline=None)
@given(
    chunk=st.sampled_from([5, 16, 256]),
    caching=st.booleans(),
    forced_preemption=st.booleans(),
    depth=st.sampled_from([1, 2, 3]),
    order=st.permutations(range(len(PROMPTS))),
)
def test_outputs_are_identical_at_every_point(
    ranks: MultiProcessExecutor,
    chunk: int,
    caching: bool,
    forced_preemption: bool,
    depth: int,
    order: list[int],
) -> None:
    num_blocks = 17 if forced_preemption else NUM_BLOCKS
    config = replace(
        ranks._config,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(8, chunk),
        enable_prefix_caching=caching,
        num_kv_blocks=num_blocks,
        depth=depth,
    )
    engine = LLMEngine(config, Lasting(ranks, num_blocks), ByteTokenizer())
    for index in order:
        engine.add_request(str(index), PROMPTS[index], PARAMS[index])
    outputs = run(engine)
    for index in order:
        assert_same(outputs[str(index)], alone(NAME)[index])


def faulty(monkeypatch: pytest.MonkeyPatch, rank: int, fault: str) -> MultiProcessExecutor:
    monkeypatch.setattr(rank_processes, "PROGRAM", PROGRAM)
    monkeypatch.setenv(FAULTY_RANK, str(rank))
    monkeypatch.setenv(FAULT, fault)
    return pipeline((2, 1), depth=3)


def test_a_first_stage_that_hangs_in_mid_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one waits for it: neither is ahead."""
    for module in (watched, mp_executor):  # shorter here: test_mp_executor.py is about the real one
        monkeypatch.setattr(module, "LAG_SECONDS", 2.0)
    executor = faulty(monkeypatch, 0, LOOP)
    engine = LLMEngine(executor._config, executor, ByteTokenizer())
    pids, folder = executor.ranks.pids, executor.ranks.folder  # type: ignore[attr-defined]
    engine.add_request("good", PROMPT, greedy(4))
    assert run(engine)["good"].outputs[0].finish_reason == "length"
    engine.add_request("fatal", FATAL, greedy(4))
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"ranks have ended: rank 0 \(stage 0 of 2\) hangs"):
        run(engine)
    assert time.monotonic() - begin < LIMIT
    assert_gone(pids, folder)
    engine.shutdown()


def test_a_step_that_fails_in_the_last_stage_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks go on, until one of them is killed."""
    executor = faulty(monkeypatch, 1, FAIL)
    engine = LLMEngine(executor._config, executor, ByteTokenizer())
    engine.add_request("good", PROMPT, greedy(12))
    engine.add_request("fatal", FATAL, greedy(12))
    outputs = run(engine)
    assert outputs["fatal"].outputs[0].finish_reason == "error"
    engine.add_request("again", PROMPT, greedy(12))
    again = run(engine)["again"].outputs[0].token_ids
    [expected] = generate(tiny_engine(), [PROMPT], greedy(12))
    assert outputs["good"].outputs[0].token_ids == again == expected
    os.kill(executor.ranks.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
    engine.add_request("late", PROMPT, greedy(12))
    with pytest.raises(EngineDeadError, match=r"rank 1 \(stage 1 of 2\) was killed by SIGKILL"):
        run(engine)
    engine.shutdown()
