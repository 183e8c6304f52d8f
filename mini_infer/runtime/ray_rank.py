"""A rank as a Ray actor: the same ``RankWorker``, on whatever host Ray has put it."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray

from mini_infer.parallel.rendezvous import AddressRendezvous
from mini_infer.runtime.engine_process import THREADS
from mini_infer.runtime.rank_messages import Load
from mini_infer.runtime.rank_worker import BEAT_SECONDS, EngineLink, RankWorker
from mini_infer.runtime.ray_beats import BeatSender

if TYPE_CHECKING:
    from mini_infer.modeling.model_files import ModelFiles

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Meeting:
    """Where ranks find their engine: addresses of sockets, and of the store that it keeps."""

    orders: tuple[str, ...]
    """By rank."""
    reports: str
    beats: str
    store_host: str
    store_port: int


@dataclass(frozen=True)
class Seat:
    """Where a rank runs."""

    host: str
    """The address that Ray has for it."""
    pid: int
    gpu: int | None
    """torch's number of it, of those that the rank sees; None on a CPU."""

    def __str__(self) -> str:
        where = self.host if self.gpu is None else f"{self.host}, GPU {self.gpu}"
        return f"process {self.pid} on {where}"


class RayRank:
    """The actor. One call of ``run`` lasts as long as the engine."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        for name, value in THREADS.items():
            os.environ.setdefault(name, value)
        if rank:
            os.environ["TQDM_DISABLE"] = "1"  # one of them shows its progress

    def seat(self) -> Seat:
        """Also says that it has started."""
        return Seat(ray.util.get_node_ip_address(), os.getpid(), _own_gpu())

    def run(self, meeting: Meeting) -> None:
        """Runs until the engine says so, or the rank fails, and has told the engine."""
        interface = interface_of(ray.util.get_node_ip_address())
        worker = RayRankWorker(
            self._rank,
            self._size,
            EngineLink(meeting.orders[self._rank], meeting.reports),
            BeatSender(meeting.beats, self._rank, BEAT_SECONDS),
            AddressRendezvous(meeting.store_host, meeting.store_port, interface),
            gpu=_own_gpu() or 0,
        )
        worker.serve()


class RayRankWorker(RankWorker):
    """One whose host need not have the engine's files."""

    def _locate(self, order: Load) -> "ModelFiles":
        if order.config.load_format == "dummy" or Path(order.weights).exists():
            return super()._locate(order)
        from mini_infer.modeling.model_files import locate_model

        return locate_model(order.config.model)


def interface_of(host: str) -> str | None:
    """The network interface of this host that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == host for each in addresses):
            return name
    return None


def gpu_index(assigned: str, visible: str | None) -> int:
    """torch's number of the GPU that Ray calls ``assigned``, where ``CUDA_VISIBLE_DEVICES`` is
    ``visible``: the ranks of a host see all of its GPUs, as they reach into each other's memory."""
    return visible.split(",").index(assigned) if visible else int(assigned)


def _own_gpu() -> int | None:
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return gpu_index(gpus[0], os.environ.get(VISIBLE_DEVICES)) if gpus else None
