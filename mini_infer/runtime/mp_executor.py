"""The executor of a model that is spread over processes of this host: one scheduler, many ranks."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import MAX_DEPTH, EngineConfig
from mini_infer.core.outputs import StepOutput
from mini_infer.core.step_costs import StepCosts
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.weight_memory import check_memory
from mini_infer.runtime.executor import StepHandle
from mini_infer.runtime.local_executor import warn_if_short
from mini_infer.runtime.rank_messages import (
    Costs,
    Done,
    Failed,
    FromRank,
    Load,
    Measure,
    Prepare,
    Profile,
    Result,
    Run,
    Sample,
    StepFailed,
    ToRank,
    Up,
)
from mini_infer.runtime.rank_processes import RankProcesses
from mini_infer.runtime.ranks import LAG_SECONDS, Ranks
from mini_infer.runtime.step_limit import layer_limit


class MultiProcessExecutor:
    """Implements ``WatchedExecutor``: every rank gets every step, and the first one of the
    last stage tells what it brought.

    ::

        submit ──► Run ──► rank 0 ──► Result ──► result
                     ├───► rank 1        all-reduces between the ranks of a stage,
                     └───► ...           in every layer
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self._config, self._files = config, files
        self._ranks: Ranks | None = None
        self._num_submitted = 0
        self._epoch = 0
        self._results: dict[int, StepOutput] = {}
        self._failures: dict[int, dict[int, StepFailed]] = {}
        """By step and rank."""
        self._succeeded: deque[int] = deque(maxlen=2 * MAX_DEPTH)
        """The last steps of which the result was told."""

    @property
    def ranks(self) -> Ranks:
        """They are there between ``start`` and ``shutdown``."""
        assert self._ranks is not None, "the executor runs"
        return self._ranks

    def start(self) -> int:
        """Loads the model's parts side by side; the rank with the least room has the say.

        Raises:
            WeightsError: the checkpoint does not fit the architecture.
            OutOfMemoryError: weights or KV cache do not fit the memory.
            EngineDeadError: a rank ended.
        """
        config, files = self._config, self._files
        self._ranks = self._start_ranks()
        if config.is_pipelined and config.device == "cpu":
            self._ranks.layer_seconds = layer_limit(config)
        try:
            for _ in self._answers():
                pass  # all of them are up, so that none waits for another that is not
            self._order(Load(config, str(files.folder), str(files.weights)))
            num_blocks = min(self._order(Profile()))
            self._order(Prepare(num_blocks))
        except BaseException:
            self.shutdown()
            raise
        warn_if_short(config, num_blocks)
        return num_blocks

    def step_costs(self) -> StepCosts | None:
        """See ``Executor.step_costs``."""
        self.ranks.send(Measure())
        return next(
            message.costs
            for message in list(self._answers())
            if isinstance(message, Costs) and self.ranks.places[message.rank].tells_results
        )

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        number = self._num_submitted
        self._num_submitted += 1
        self.ranks.send(Run(number, self._epoch, batch))
        return _MaskedRankStep(self, number) if batch.masked else _RankStep(self, number)

    def sample(self, number: int, masks: bytearray) -> None:
        """Brings a step's masks to all ranks."""
        self.ranks.send(Sample(number, self._epoch, bytes(masks)))

    def result(self, number: int) -> StepOutput:
        """Waits for a step.

        Raises:
            EngineDeadError: a rank ended, or hangs, or failed where others did not.
            Exception: what the step raised on every rank of the last stage.
        """
        failed_at = None
        while number not in self._results:
            failures = self._failures.get(number, {})
            if failures.keys() == self._sampling_ranks:
                self._epoch += 1
                del self._failures[number]
                raise failures[min(failures)].failure.to_exception()
            if failures and failed_at is None:
                failed_at = time.monotonic()
            # Before who watches the ranks blames one that only waits for it.
            if failed_at is not None and time.monotonic() - failed_at > LAG_SECONDS / 2:
                self._fail_apart(failures)
            self._take_in(self.ranks.receive(seconds=min(1.0, LAG_SECONDS / 4)))
        # Of steps before, nobody asks any more.
        self._results = {key: output for key, output in self._results.items() if key >= number}
        return self._results.pop(number)

    def look(self) -> None:
        """See ``WatchedExecutor.look``."""
        self._take_in(self.ranks.look())

    def shutdown(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def _start_ranks(self) -> Ranks:
        if self._config.device == "cpu":  # whose memory the ranks share
            check_memory(self._config)
        size, num_stages = self._config.num_ranks, self._config.pipeline_parallel_size
        return RankProcesses(size, max(1, torch.get_num_threads() // size), num_stages)

    def _order(self, order: ToRank) -> list[int]:
        """Sends an order and waits until all ranks have followed it; the blocks that they found."""
        self.ranks.send(order)
        return [message.num_blocks for message in self._answers() if isinstance(message, Done)]

    def _answers(self) -> Iterator[Up | Done | Costs]:
        """One message of each rank."""
        missing = set(range(self.ranks.size))
        while missing:
            message = self.ranks.receive(loading=True)
            if isinstance(message, Failed) and message.lost_another:
                self.ranks.blame(message)
            if isinstance(message, Failed):
                raise message.failure.to_exception()
            assert isinstance(message, Up | Done | Costs)
            missing.remove(message.rank)
            yield message

    @property
    def _sampling_ranks(self) -> set[int]:
        """Those of the last stage. A request can make nothing else fail."""
        return {place.rank for place in self.ranks.places if place.is_in_last_stage}

    def _take_in(self, message: FromRank | None) -> None:
        match message:
            case Result():
                self._results[message.number] = message.output
                self._succeeded.append(message.number)
            case StepFailed():
                failures = self._failures.setdefault(message.number, {})
                failures[message.rank] = message
                if message.rank not in self._sampling_ranks:
                    self._fail_apart({message.rank: message})
            case Failed() if message.lost_another:
                for failures in self._failures.values():
                    if (
                        failures.keys() != self._sampling_ranks
                    ):  # else a request's fault, or its end
                        self._fail_apart(failures)
                self.ranks.blame(message)
            case Failed():
                self.ranks.fail(
                    f"{self.ranks.name(message.rank)} failed: {message.failure.message}"
                )
            case None:
                pass
            case _:
                raise AssertionError(f"no step answers {message}")
        for number in self._succeeded:
            if number in self._failures:
                self._fail_apart(self._failures[number])

    def _fail_apart(self, failures: Mapping[int, StepFailed]) -> NoReturn:
        """Where only some ranks fail, they have no common state any more."""
        failed = next(iter(failures.values()))
        self.ranks.fail(
            f"{self.ranks.name(failed.rank)} failed in a step where others did not: "
            f"{failed.failure.message}"
        )


class _RankStep:
    def __init__(self, executor: MultiProcessExecutor, number: int) -> None:
        self._executor, self._number = executor, number

    def result(self) -> StepOutput:
        return self._executor.result(self._number)


class _MaskedRankStep(_RankStep):
    def sample(self, masks: bytearray) -> None:
        self._executor.sample(self._number, masks)
