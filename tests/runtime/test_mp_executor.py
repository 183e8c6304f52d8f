"""Ranks as processes: the same tokens as one process, and faults that end in a clear error, within
seconds, with nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from mini_infer.core.errors import EngineDeadError, WeightsError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.parallel.group import COLLECTIVE_SECONDS
from mini_infer.parallel.rank_place import RankPlace
from mini_infer.runtime import mp_executor
from mini_infer.runtime import ranks as watched
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.engine_messages import Failure
from mini_infer.runtime.mp_executor import MultiProcessExecutor
from mini_infer.runtime.rank_messages import Failed, StepFailed
from tests.runtime.engine_tools import generate, greedy, run
from tests.runtime.fake_executor import make_config
from tests.runtime.faulty_ranks import FATAL_TOKEN
from tests.runtime.test_engine_process import process_of, running, text_of, until
from tests.runtime.tiny_model import tiny_engine

pytestmark = pytest.mark.processes

PROMPT = [5, 6, 7, 8]
FATAL = [FATAL_TOKEN, 5, 6]
LIMIT = 10.0
"""Seconds from a fault to its error."""
NOTHING = ModelFiles(Path("unused"), Path("unused"))


def executor(fault: str | None = None, **options: Any) -> MultiProcessExecutor:
    if fault is not None:
        options["speculative_config"] = SpeculativeConfig(
            method=f"tests.runtime.faulty_ranks:{fault}",
            num_speculative_tokens=1,
            adaptive=False,
            on_device=True,
        )
    config = make_config(tensor_parallel_size=2, distributed_executor_backend="mp", **options)
    return MultiProcessExecutor(config, NOTHING)


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    return generate(tiny_engine(), [prompt], params)[0]


def engine_over(ranks: MultiProcessExecutor) -> LLMEngine:
    return LLMEngine(ranks._config, ranks, ByteTokenizer())


def assert_gone(pids: list[int], folder: Path) -> None:
    assert not folder.exists()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_the_limits_leave_room() -> None:
    """A collective that waits in vain, or a silent rank, then the search for who is to blame."""
    waits = (
        COLLECTIVE_SECONDS + watched.GRACE_SECONDS,
        watched.SILENCE_SECONDS,
        watched.LAG_SECONDS,
    )
    assert max(waits) + 1 < LIMIT


@pytest.mark.parametrize(
    ("fault", "limit", "reason"),
    [
        ("IsKilled", None, "rank 1 was killed by SIGKILL"),
        ("IsStopped", "SILENCE_SECONDS", "rank 1 has given no sign of life"),
        ("Loops", "LAG_SECONDS", "rank 1 hangs|has waited in vain"),
        ("FailsOnOne", "LAG_SECONDS", "rank 1 failed in a step where others did not.*it was told"),
    ],
)
def test_a_fault_of_one_rank_in_mid_step(
    fault: str, limit: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:  # which is shorter here: the test before is about the real ones
        monkeypatch.setattr(watched, limit, 2.0)
        monkeypatch.setattr(mp_executor, limit, 2.0, raising=False)
    ranks = executor(fault)
    engine = engine_over(ranks)
    pids, folder = ranks.ranks.pids, ranks.ranks.folder
    engine.add_request("good", PROMPT, greedy(4))
    assert run(engine)["good"].outputs[0].finish_reason == "length"
    engine.add_request("fatal", FATAL, greedy(4))
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"the model's 2 ranks have ended: .*({reason})"):
        run(engine)
    assert time.monotonic() - begin < LIMIT
    assert_gone(pids, folder)
    with pytest.raises(EngineDeadError, match="have ended"):
        ranks.submit(None)  # type: ignore[arg-type]
    engine.shutdown()


def test_a_step_that_fails_on_every_rank_ends_its_request_only() -> None:
    """The ranks go on, until one of them is killed."""
    ranks = executor("FailsOnAll", depth=2)
    engine = engine_over(ranks)
    engine.add_request("good", PROMPT, greedy(12))
    engine.add_request("fatal", FATAL, greedy(12))
    outputs = run(engine)
    assert outputs["fatal"].outputs[0].finish_reason == "error"
    engine.add_request("again", PROMPT, greedy(12))
    again = run(engine)["again"].outputs[0].token_ids
    assert outputs["good"].outputs[0].token_ids == again == alone(PROMPT, greedy(12))
    os.kill(ranks.ranks.pids[0], signal.SIGKILL)  # while nobody waits for it
    engine.add_request("late", PROMPT, greedy(12))
    with pytest.raises(EngineDeadError, match="rank 0 was killed by SIGKILL"):
        run(engine)
    engine.shutdown()


def test_a_request_that_failed_is_not_to_blame_for_a_rank_that_ends_later() -> None:
    ranks = executor()
    ranks._ranks = watched_ranks = Mock(places=[RankPlace(rank, 2, 1) for rank in range(2)])
    watched_ranks.fail.side_effect = AssertionError("it failed on every rank")
    watched_ranks.blame.side_effect = EngineDeadError("rank 0 was killed")
    for rank in range(2):
        ranks._take_in(StepFailed(rank, 7, Failure("StepError", "a step before it failed")))
    with pytest.raises(EngineDeadError, match="was killed"):
        ranks._take_in(Failed(1, Failure("CollectiveError", "gone"), lost_another=True))


def test_an_error_while_loading_is_what_one_process_raises() -> None:
    config = make_config(
        tensor_parallel_size=2, distributed_executor_backend="mp", load_format="safetensors"
    )
    ranks = MultiProcessExecutor(config, ModelFiles(Path("/nowhere"), Path("/nowhere")))
    with pytest.raises(WeightsError, match="/nowhere holds no"):
        ranks.start()
    assert_gone(ranks.ranks.pids, ranks.ranks.folder)
    ranks.shutdown()


PARENT = """
import sys, time
sys.path[:0] = {path!r}
from tests.runtime.test_mp_executor import executor
ranks = executor()
ranks.start()
print(ranks.ranks.folder, *ranks.ranks.pids, flush=True)
time.sleep(60)
"""


def test_ranks_end_with_their_engine() -> None:
    program = PARENT.format(path=sys.path)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    folder, *pids = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + LIMIT
    ranks = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(ranks, timeout=LIMIT)
    assert not alive
    assert not Path(folder).exists()
    assert time.monotonic() < deadline


async def test_a_server_gets_another_engine_when_a_rank_is_killed(tmp_path: Path) -> None:
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = {"architectures": ["LlamaForCausalLM"], **shape, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {
        "model": str(tmp_path),
        "load_format": "dummy",
        "device": "cpu",
        "tensor_parallel_size": 2,
        "kv_cache_memory": 2**20,
        "max_model_len": 256,
    }
    async with running(options) as engine:
        expected = await text_of(engine, "Hello")
        ranks = psutil.Process(process_of(engine).pid).children()
        assert len(ranks) == 2
        ranks[0].kill()
        with pytest.raises(EngineDeadError):
            await text_of(engine, "Hello")
        await until(lambda: engine.healthy)
        assert await text_of(engine, "Hello") == expected
        assert not [rank for rank in ranks if rank.is_running()]
        ranks = psutil.Process(process_of(engine).pid).children()
        ranks[1].kill()
        await until(lambda: not engine.healthy)  # nobody has asked it anything
    _, alive = psutil.wait_procs(ranks, timeout=LIMIT)
    assert not alive
