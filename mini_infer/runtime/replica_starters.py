"""Starts a server's engines: processes of the same options, each on devices of its own."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.core.errors import InvalidConfigError
from mini_infer.runtime.engine_process import EngineProcess, EngineStarter

if TYPE_CHECKING:
    from mini_infer.core.engine_config import EngineConfig

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
NUM_THREADS = "OMP_NUM_THREADS"


class ReplicaStarters:
    """An ``EngineStarter`` for each replica. A context manager, which ends what was spawned and not
    started.

    Raises:
        InvalidConfigError: there are fewer GPUs than the replicas take.
    """

    def __init__(self, options: Mapping[str, Any], num_replicas: int = 1) -> None:
        """``options`` are those of ``EngineConfig``, of all of them."""
        self.each = [
            EngineStarter(options, replica_environment(options, index, num_replicas))
            for index in range(num_replicas)
        ]

    def __enter__(self) -> "ReplicaStarters":
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def spawn(self) -> None:
        """Starts the first one's process."""
        self.each[0].spawn()

    def locate(self) -> Path | None:
        """``EngineStarter.locate`` of the first one, which fetches the model if it is not there,
        and then starts the others' processes. They all go on loading."""
        first, *others = self.each
        folder = first.locate()
        for starter in others:
            starter.spawn()
        return folder

    def start(self) -> list[EngineProcess]:
        """Loaded engines; raises what ``EngineProcess.finish`` and ``common_config`` do, and then
        starts none."""
        processes: list[EngineProcess] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.cancel)
            for starter in self.each:
                process = starter.start()
                stack.callback(process.close)
                processes.append(process)
            common_config([process.config for process in processes])
            stack.pop_all()
        return processes

    def cancel(self) -> None:
        """Ends what is being started."""
        for starter in self.each:
            starter.cancel()


def replica_environment(options: Mapping[str, Any], index: int, num: int) -> dict[str, str]:
    """Variables for the process of replica ``index`` of ``num``: its own GPUs, and its share of the
    processor's cores, unless the user said how many threads there shall be.

    Raises:
        InvalidConfigError: there are fewer GPUs than the replicas take.
    """
    if num == 1:
        return {}
    threads = os.environ.get(NUM_THREADS) or str(max(1, _num_cores() // num))
    environment = {NUM_THREADS: threads}
    per_replica = int(options.get("tensor_parallel_size") or 1)
    per_replica *= int(options.get("pipeline_parallel_size") or 1)
    wanted = range(index * per_replica, (index + 1) * per_replica)
    visible = os.environ.get(VISIBLE_DEVICES)
    devices = _gpus() if visible is None else [name for name in visible.split(",") if name]
    on_gpus = bool(devices) and options.get("device") != "cpu" and not options.get("dry_run")
    if options.get("distributed_executor_backend") == "ray" and len(devices) < num * per_replica:
        return environment  # there are others in the cluster
    if on_gpus and len(devices) < num * per_replica:
        raise InvalidConfigError(
            f"{num} replicas take {num * per_replica} GPUs, and there are {len(devices)}: give "
            f"fewer replicas, or device 'cpu'"
        )
    if on_gpus:
        environment[VISIBLE_DEVICES] = ",".join(devices[number] for number in wanted)
    return environment


def _gpus() -> list[str]:
    """Numbers of NVIDIA's devices, without a library that would take seconds to import."""
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def common_config(configs: Sequence["EngineConfig"]) -> "EngineConfig":
    """What all engines can promise: each found as much memory as there was for it.

    Raises:
        InvalidConfigError: they run on different kinds of devices.
    """
    first = configs[0]
    if any(config.device != first.device for config in configs):
        raise InvalidConfigError(
            f"of {len(configs)} replicas only some found a GPU: ask for as many as there are GPUs, "
            f"or for device 'cpu'"
        )
    blocks = [config.num_kv_blocks for config in configs if config.num_kv_blocks is not None]
    return replace(first, num_kv_blocks=min(blocks)) if blocks else first
