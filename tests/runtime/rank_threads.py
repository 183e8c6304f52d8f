"""Ranks of a model, in one stage or in several, as threads of one process: real shards, runners and
steps, and groups without sockets."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.stage_runner import StageRunner
from mini_infer.modeling.step_cost_profile import measure_step_costs
from mini_infer.modeling.step_result import MaskedStep
from mini_infer.parallel.group import TensorParallelGroup, side_by_side
from mini_infer.parallel.pipeline import StageLink
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.executor import StepHandle
from tests.runtime.fake_executor import make_config

T = TypeVar("T")
Pipe = queue.SimpleQueue[Tensor]
PATIENCE = 20.0


class Meeting:
    """Where threads exchange what each brings; a thread that fails sends the others home."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.brought: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        all_of_them = list(self.brought)
        self.barrier.wait()
        return all_of_them


class ThreadGroup(TensorParallelGroup):
    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting
        self.logits: list[Tensor] = []

    def all_reduce_(self, x: Tensor) -> Tensor:
        parts = self._meeting.exchange(self.rank, x.clone())
        assert len({part.shape for part in parts}) == 1
        return x.copy_(torch.stack(parts).sum(0))

    def all_gather_columns(self, x: Tensor, num_columns: int, out: Tensor | None = None) -> Tensor:
        parts = self._meeting.exchange(self.rank, x)
        gathered = side_by_side(torch.stack(parts), num_columns, out)
        self._meeting.exchange(self.rank, None)  # nobody overwrites what another one reads
        self.logits.append(gathered.clone())
        return gathered

    def broadcast_(self, x: Tensor) -> Tensor:
        return x.copy_(self._meeting.exchange(self.rank, x.clone())[0])

    def slowest(self, seconds: float) -> float:
        return max(self._meeting.exchange(self.rank, seconds))


class ThreadLink(StageLink):
    def __init__(self, meeting: Meeting, rank: int, before: Pipe, behind: Pipe) -> None:
        """The last stage's way goes on to the first one."""
        self._meeting, self._rank = meeting, rank
        self._before, self._behind = before, behind

    def receive_(self, x: Tensor) -> Tensor:
        sent = self._before.get(timeout=PATIENCE)
        assert sent.shape == x.shape
        assert sent.dtype == x.dtype
        return x.copy_(sent)

    def send(self, x: Tensor) -> None:
        self._behind.put(x)

    receive_tokens_, feed_back = receive_, send

    def slowest(self, seconds: float) -> float:
        return max(self._meeting.exchange(self._rank, seconds))


class RankThreads:
    """Implements ``Executor``."""

    def __init__(self, config: EngineConfig, files: ModelFiles | None = None) -> None:
        files = files or ModelFiles(Path("unused"), Path("unused"))
        size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self.meetings = [Meeting(size) for _ in range(num_stages)]
        self.groups = [
            ThreadGroup(meeting, rank, size) for meeting in self.meetings for rank in range(size)
        ]
        self.runners: list[ModelRunner] = []
        self._meeting_of_all = Meeting(config.num_ranks)
        pipes: list[Pipe] = [queue.SimpleQueue() for _ in self.groups]
        for rank, group in enumerate(self.groups):
            if num_stages == 1:
                self.runners.append(ModelRunner(config, files, group))
                continue
            link = ThreadLink(self._meeting_of_all, rank, pipes[rank - size], pipes[rank])
            self.runners.append(StageRunner(config, files, group, link, rank // size, int))
        self._tells = (num_stages - 1) * size
        self._threads = ThreadPoolExecutor(config.num_ranks)

    def start(self) -> int:
        # Side by side, as they compare a draft head's target. Torch's default dtype is the
        # process's, but here all have the same.
        self._all(lambda runner: runner.load())
        num_blocks = min(runner.profile_num_blocks() for runner in self.runners)
        self._all(lambda runner: runner.init_cache(num_blocks))
        self._all(lambda runner: runner.capture_graphs())
        return num_blocks

    def step_costs(self) -> StepCosts | None:
        return self._all(measure_step_costs)[self._tells]

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        handles = self._all(lambda runner: runner.execute(batch))
        return _Masked(self, handles) if batch.masked else handles[self._tells]

    def shutdown(self) -> None:
        self._threads.shutdown()

    def assert_same_logits(self) -> None:
        """Bitwise, on all ranks of the last stage, of all steps so far."""
        first, *others = (group.logits for group in self.groups[self._tells :])
        for logits in others:
            assert len(logits) == len(first) > 0
            assert all(map(torch.equal, logits, first))

    def _all(self, work: Callable[[ModelRunner], T]) -> list[T]:
        def guarded(runner: ModelRunner) -> T:
            try:
                return work(runner)
            except BaseException:
                for meeting in (*self.meetings, self._meeting_of_all):
                    meeting.barrier.abort()
                raise

        futures = [self._threads.submit(guarded, runner) for runner in self.runners]
        failures = [error for future in futures if (error := future.exception()) is not None]
        for error in failures:
            if not isinstance(error, threading.BrokenBarrierError | queue.Empty):
                raise error
        return [future.result() for future in futures]


class _Masked:
    def __init__(self, ranks: RankThreads, handles: list[Any]) -> None:
        self._ranks, self._handles = ranks, dict(zip(ranks.runners, handles, strict=True))

    def sample(self, masks: bytearray) -> None:
        def sample(runner: ModelRunner) -> None:
            step = self._handles[runner]
            assert isinstance(step, MaskedStep)
            step.sample(bytearray(masks))

        self._ranks._all(sample)

    def result(self) -> Any:
        return self._handles[self._ranks.runners[self._ranks._tells]].result()


def sharded_engine(files: ModelFiles | None = None, **options: object) -> LLMEngine:
    """The real model runners, one a thread, with seeded random weights."""
    config = make_config(distributed_executor_backend="mp", **options)
    return LLMEngine(config, RankThreads(config, files), ByteTokenizer())
