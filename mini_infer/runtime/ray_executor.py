"""The executor of a model that is spread over the hosts of a Ray cluster.

Ray places the ranks, starts them, tells of their deaths and ends them. What they and the engine say
to each other in a step goes past it, the same way as on one host: a message of Ray's takes longer
than a step may wait.
"""

import contextlib
import re
from typing import Any

import ray
import torch
import zmq
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch._C._distributed_c10d import TCPStore

from mini_infer.core.engine_config import EngineConfig
from mini_infer.runtime.mp_executor import MultiProcessExecutor
from mini_infer.runtime.ranks import STOP_SECONDS, Ranks
from mini_infer.runtime.ray_beats import BeatReceiver
from mini_infer.runtime.ray_cluster import CONNECTION, RankPlan, reserve
from mini_infer.runtime.ray_rank import Meeting, RayRank, Seat

REASON = re.compile(r"(The actor (?:died|is dead|is temporarily).*?)(?: Some common| The task|$)")
START_SECONDS = 60.0
"""What a host may take to start an interpreter and import this package."""


class RayExecutor(MultiProcessExecutor):
    """Implements ``Executor``."""

    def _start_ranks(self) -> Ranks:
        """Raises ClusterResourcesError too."""
        return RayRanks(plan_of(self._config))


def plan_of(config: EngineConfig) -> RankPlan:
    """What the ranks of an engine take. On a CPU, as many cores as ``mp`` would give them threads:
    OMP_NUM_THREADS is what all of them have together."""
    return RankPlan(
        num_stages=config.pipeline_parallel_size,
        stage_size=config.tensor_parallel_size,
        on_gpus=config.device == "cuda",
        num_cpus=max(1, torch.get_num_threads() // config.num_ranks),
    )


class RayRanks(Ranks):
    """An actor for each rank, in a placement group that ends with them, or with this process."""

    grace_seconds = 3.0
    """Ray asks a host that does not answer more than once."""

    def __init__(self, plan: RankPlan) -> None:
        """Connects to the cluster, and starts the ranks where there is room.

        Raises:
            ClusterResourcesError: there is none.
            EngineDeadError: a rank did not start.
        """
        CONNECTION.open()
        super().__init__(plan.num_stages * plan.stage_size, plan.num_stages)
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        """The calls that last as long as the ranks do."""
        self._seats: list[Seat] = []
        self._group: PlacementGroup | None = None
        self._ends: dict[int, str] = {}
        """How ranks have ended; nothing where they said so themselves."""
        self._beats = beats = BeatReceiver(self.size)
        host = ray.util.get_node_ip_address()
        try:
            beats.bind(host)
            for socket in (self._inbox, *self._outboxes):
                socket.bind(f"tcp://{host}:*")
            self._store = TCPStore(host, 0, self.size, is_master=True, wait_for_workers=False)
            self._group = reserve(plan)
            self._start(plan, self._group)
            meeting = Meeting(
                orders=tuple(one.getsockopt_string(zmq.LAST_ENDPOINT) for one in self._outboxes),
                reports=self._inbox.getsockopt_string(zmq.LAST_ENDPOINT),
                beats=beats.address,
                store_host=host,
                store_port=self._store.port,
            )
            self._runs = [actor.run.remote(meeting) for actor in self._actors]
        except (zmq.ZMQError, RayError, RuntimeError) as error:
            self._die(f"they can't be started: {_summary(error)}")
        except BaseException:
            self._clean_up()
            raise
        self._watch_anew()

    @property
    def seats(self) -> list[Seat]:
        """Where each rank runs."""
        return self._seats

    def name(self, rank: int) -> str:
        name = str(self.places[rank])
        return f"{name} ({self._seats[rank]})" if self._seats else name

    def _start(self, plan: RankPlan, group: PlacementGroup) -> None:
        for rank in range(self.size):
            strategy = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=self.places[rank].stage
            )
            options: dict[str, Any] = {"scheduling_strategy": strategy, "num_cpus": plan.num_cpus}
            if plan.on_gpus:
                # Ranks of a host reach into each other's GPUs, so all of them are to be seen.
                variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
                options |= {"num_cpus": 0, "num_gpus": 1, "runtime_env": {"env_vars": variables}}
            self._actors.append(ray.remote(RayRank).options(**options).remote(rank, self.size))
        self._seats = ray.get(
            [actor.seat.remote() for actor in self._actors], timeout=START_SECONDS
        )

    def _killed(self) -> int | None:
        self._look_at_runs()
        return next((rank for rank, how in self._ends.items() if how), None)

    def _ended(self) -> int | None:
        return next(iter(self._ends), None)

    def _look_at_runs(self) -> None:
        """Notes which calls have ended, and what Ray says of those that did not return."""
        pending = {run: rank for rank, run in enumerate(self._runs) if rank not in self._ends}
        if not pending:
            return
        ended, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for run in ended:
            try:
                ray.get(run)
                self._ends[pending[run]] = ""
            except RayError as error:
                self._ends[pending[run]] = f"is gone: {_why(error)}"

    def _how_it_ended(self, rank: int) -> str:
        return self._ends[rank] or "has ended; its output above may say why"

    def _wait_for_ends(self, seconds: float) -> None:
        with contextlib.suppress(RayError):
            ray.wait(self._runs, num_returns=len(self._runs), timeout=seconds)

    def _end_all(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
        self._wait_for_ends(STOP_SECONDS)
        CONNECTION.close()


def _why(error: RayError) -> str:
    """What Ray says, without its numbers for things and its guesses."""
    text = " ".join(str(error).split())
    found = REASON.search(text)
    why = found[1] if found else _summary(error)
    if isinstance(error, ActorUnavailableError):
        detail = why.removeprefix("The actor is temporarily unavailable: ")
        return f"Ray does not reach it any more ({detail})"
    return why


def _summary(error: Exception) -> str:
    """Of a message that may have a traceback of another process in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else type(error).__name__
