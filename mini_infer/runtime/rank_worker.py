"""A rank's process: loads its part of a model, then runs the steps that its engine sends.

    python -c "..." FOLDER RANK SIZE BEATS

``RankProcesses`` starts it; BEATS is the descriptor of memory that all map. Standard input is the
engine's lifeline: it ends when the engine's process does, however that ends, and this process with
it.
"""

import os
import platform
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import DEBUG, EngineDeadError, InvalidConfigError
from mini_infer.parallel.rank_place import RankPlace
from mini_infer.parallel.rendezvous import FolderRendezvous, Rendezvous
from mini_infer.runtime.engine_messages import Failure
from mini_infer.runtime.rank_beats import RankBeats, StepCounter
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
    Stop,
    ToRank,
    Up,
)

if TYPE_CHECKING:
    import torch

    from mini_infer.modeling.model_files import ModelFiles
    from mini_infer.modeling.model_runner import ModelRunner
    from mini_infer.modeling.step_result import LocalStep, MaskedStep

BEAT_SECONDS = 0.25
LAST_WORDS_MS = 500
INBOX, OUTBOX = "rank-{}", "engine"
"""Names of the sockets in the folder: one for each rank's orders, one for all that they tell."""
REFUSED = "a step before it failed"


def main() -> None:
    """Runs until the engine says so, or is gone."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # Ctrl-C and a service manager's SIGTERM are the engine's to obey: it tells us when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_engine, args=(folder,), daemon=True).start()
    beats = RankBeats(int(sys.argv[4]), size)
    threading.Thread(target=_beat, args=(beats, rank), daemon=True).start()
    link = EngineLink(f"ipc://{folder}/{INBOX.format(rank)}", f"ipc://{folder}/{OUTBOX}")
    worker = RankWorker(rank, size, link, beats, FolderRendezvous(folder), gpu=rank)
    # Other ranks need not be there any more for a farewell.
    os._exit(0 if worker.serve() else 1)


class EngineLink:
    """Orders in, reports out; several threads may report."""

    def __init__(self, inbox: str, outbox: str) -> None:
        """Addresses of ZeroMQ sockets that the engine has bound."""
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket, address in ((self._inbox, inbox), (self._outbox, outbox)):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
            socket.connect(address)
        self._sending = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToRank).decode

    def receive(self) -> ToRank:
        """The next order; waits for it."""
        order: ToRank = self._decode(self._inbox.recv())
        return order

    def send(self, message: FromRank) -> None:
        """Never waits; nothing is sent any more after ``close``."""
        with self._sending:
            if not self._outbox.closed:
                self._outbox.send(self._encode(message))

    def close(self) -> None:
        """Once what was sent is there, or nobody takes it."""
        self._inbox.close()
        with self._sending:  # a last step's result may still come, or fail as other ranks have left
            self._outbox.close()
        self._context.term()


class RankWorker:
    """Obeys the link. One thread launches steps; on the rank that tells their results another one
    waits for these, so that the next step is launched meanwhile."""

    def __init__(
        self,
        rank: int,
        size: int,
        link: EngineLink,
        beats: StepCounter,
        rendezvous: Rendezvous,
        *,
        gpu: int,
    ) -> None:
        """``gpu`` is the number that torch gives this rank's, where the model runs on GPUs."""
        self._rank, self._size = rank, size
        self._link, self._beats = link, beats
        self._rendezvous, self._gpu = rendezvous, gpu
        self._place = RankPlace(rank, size, 1)
        self._runner: ModelRunner
        self._unsampled: MaskedStep | None = None
        self._failed_epoch = -1
        self._last_run = self._last_sampled = -1
        self._launched: queue.SimpleQueue[tuple[int, LocalStep | MaskedStep]] = queue.SimpleQueue()

    def serve(self) -> bool:
        """Runs until the engine says so. Tells it of an error that ends the rank, and returns
        whether there was none."""
        error = None
        try:
            self._link.send(Up(self._rank))
            self._run()
        except Exception as raised:
            error = raised
            if os.environ.get(DEBUG, "") not in ("", "0"):  # the engine has the error's text only
                traceback.print_exc()
            self._link.send(Failed(self._rank, Failure.of(error), _lost_another(error)))
        self._link.close()
        return error is None

    def _run(self) -> None:
        while True:
            order = self._link.receive()
            match order:
                case Run() | Sample():
                    self._step(order)
                case Load():
                    self._load(order)
                    self._link.send(Done(self._rank))
                case Profile():
                    self._link.send(Done(self._rank, self._count_blocks()))
                case Prepare():
                    self._prepare(order.num_blocks)
                    self._link.send(Done(self._rank))
                case Measure():
                    from mini_infer.modeling.step_cost_profile import measure_step_costs

                    self._link.send(Costs(self._rank, measure_step_costs(self._runner)))
                case Stop():
                    return

    def _load(self, order: Load) -> None:
        import torch  # takes seconds: what comes before must not wait for it

        from mini_infer.runtime.local_executor import allocation_failures

        config = order.config
        device = torch.device(config.device)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise InvalidConfigError(
                    f"rank {self._rank} is to run on a GPU, and the torch of its host "
                    f"{platform.node()} can't use GPUs: install one there that is built for them, "
                    f"or choose device cpu"
                )
            device = torch.device("cuda", self._gpu)
            torch.cuda.set_device(device)
        files = self._locate(order)
        self._place = RankPlace(
            self._rank, config.tensor_parallel_size, config.pipeline_parallel_size
        )
        self._runner = self._new_runner(config, files, device)
        if self._place.tells_results:
            threading.Thread(target=self._tell_results, daemon=True).start()
        with allocation_failures():
            self._runner.load()

    def _new_runner(
        self, config: EngineConfig, files: "ModelFiles", device: "torch.device"
    ) -> "ModelRunner":
        """Meets the other ranks."""
        if not config.is_pipelined:
            from mini_infer.modeling.model_runner import ModelRunner
            from mini_infer.parallel.group import join_ranks

            group = join_ranks(self._rank, self._size, device, self._rendezvous)
            return ModelRunner(config, files, group)
        from mini_infer.modeling.stage_runner import StageRunner
        from mini_infer.parallel.pipeline import join_stages

        group, link = join_stages(self._place, device, self._rendezvous)
        on_progress = partial(self._beats.finish_step, self._rank)
        return StageRunner(config, files, group, link, self._place.stage, on_progress)

    def _locate(self, order: Load) -> "ModelFiles":
        from mini_infer.modeling.model_files import ModelFiles

        return ModelFiles(Path(order.folder), Path(order.weights))

    def _count_blocks(self) -> int:
        from mini_infer.modeling.kernel_warm_up import compile_kernels
        from mini_infer.runtime.local_executor import allocation_failures

        with allocation_failures():
            compile_kernels(self._runner)
            return self._runner.profile_num_blocks()

    def _prepare(self, num_blocks: int) -> None:
        from mini_infer.runtime.local_executor import allocation_failures

        with allocation_failures():
            self._runner.init_cache(num_blocks)
            self._runner.capture_graphs()

    def _is_repeated(self, order: Run | Sample) -> bool:
        """An engine that is interrupted while it sends does not know how far it came."""
        if isinstance(order, Run):
            last, self._last_run = self._last_run, order.number
        else:
            last, self._last_sampled = self._last_sampled, order.number
        return order.number <= last

    def _step(self, order: Run | Sample) -> None:
        if self._is_repeated(order):
            return
        if order.epoch == self._failed_epoch:
            if isinstance(order, Run):
                self._drop(order)
            self._link.send(StepFailed(self._rank, order.number, Failure("StepError", REFUSED)))
        else:
            try:
                self._launch(order)
            except EngineDeadError:
                raise
            except Exception as error:
                self._failed_epoch = order.epoch
                self._link.send(StepFailed(self._rank, order.number, Failure.of(error)))
        self._beats.finish_step(self._rank)

    def _drop(self, order: Run) -> None:
        """Other stages have not heard of a failure, send what they compute, and wait for more."""
        if self._place.num_stages > 1:
            from mini_infer.modeling.stage_runner import StageRunner

            assert isinstance(self._runner, StageRunner)
            self._runner.drop(order.batch)

    def _launch(self, order: Run | Sample) -> None:
        if isinstance(order, Sample):
            step = self._unsampled
            assert step is not None, "it was launched"
            step.sample(bytearray(order.masks))
            self._tell(order.number, step)
            return
        launched = self._runner.execute(order.batch)
        if order.batch.masked:
            from mini_infer.modeling.step_result import MaskedStep

            assert isinstance(launched, MaskedStep)
            self._unsampled = launched
        else:
            self._tell(order.number, launched)

    def _tell(self, number: int, step: "LocalStep | MaskedStep") -> None:
        if self._place.tells_results:
            self._launched.put((number, step))

    def _tell_results(self) -> None:
        while True:
            number, step = self._launched.get()
            try:
                message: FromRank = Result(number, step.result())
            except Exception as error:
                message = Failed(self._rank, Failure.of(error), _lost_another(error))
            self._link.send(message)


def _lost_another(error: Exception) -> bool:
    group = sys.modules.get("mini_infer.parallel.group")
    return group is not None and isinstance(error, group.CollectiveError)


def _beat(beats: RankBeats, rank: int) -> None:
    while True:
        beats.beat(rank)
        time.sleep(BEAT_SECONDS)


def _end_with_engine(folder: Path) -> None:
    """Nobody else is left to remove the sockets, where the engine was killed."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
