"""What an engine wants of a Ray cluster: to be connected, and room for its ranks.

Ray finds the hosts, knows what they have and who died, and places what it is given. None of that is
done here: only what Ray would wait for without end is refused, with a word on what is missing.
"""

import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from mini_infer.core.errors import ClusterResourcesError, InvalidConfigError

ADDRESS = "RAY_ADDRESS"
NICENESS = "RAY_worker_niceness"
PROBE_SECONDS = 3.0
PLACEMENT_SECONDS = 4.0
"""Ranks that have no place after so long do not fit beside what runs there."""


@dataclass(frozen=True)
class RankPlan:
    """How many ranks, and what each of them takes."""

    num_stages: int
    stage_size: int
    """Ranks of a stage, which are on one host."""
    on_gpus: bool
    num_cpus: int
    """Cores of a rank on a CPU; one on a GPU takes none from Ray, as each host has some for it."""

    @property
    def rank_resources(self) -> dict[str, float]:
        return {"GPU": 1.0} if self.on_gpus else {"CPU": float(self.num_cpus)}

    @property
    def bundle(self) -> dict[str, float]:
        """What a stage takes. Ray puts a bundle on one host."""
        return {kind: self.stage_size * each for kind, each in self.rank_resources.items()}


class Connection:
    """This process's, which Ray has one of: whoever shares it says when it is not needed."""

    def __init__(self) -> None:
        self._num_users = 0
        self._is_ours = False
        """Did ``open`` connect, and no other code of this process?"""

    def open(self) -> None:
        """Joins the cluster of RAY_ADDRESS, or the one that this host is of, or starts one.

        Raises:
            InvalidConfigError: there is no cluster where there should be.
        """
        if not ray.is_initialized():
            _initialize()
            self._is_ours = True
        self._num_users += 1

    def close(self) -> None:
        """Leaves the cluster, and ends one that ``open`` has started, after the last user."""
        self._num_users -= 1
        if self._num_users == 0 and self._is_ours:
            self._is_ours = False
            ray.shutdown()


CONNECTION = Connection()


def _initialize() -> None:
    address = os.environ.get(ADDRESS, "")
    _probe(address)
    # Of a cluster that is started here. With Ray's 15, a rank beside a busy process would hang.
    os.environ.setdefault(NICENESS, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _own_signals():
        try:
            ray.init(address or None, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise InvalidConfigError(
                f"no Ray cluster can be reached ({error}): run this on one of its hosts (ray start "
                f"--address=...), give it the first host's ~/.ray/auth_token if the cluster asks "
                f"for a token, and check {ADDRESS}, or leave that out to start one on this host"
            ) from None


def has_gpus() -> bool:
    """Does the cluster have any?

    Raises:
        InvalidConfigError: there is no cluster where there should be.
    """
    CONNECTION.open()
    try:
        return "GPU" in ray.cluster_resources()
    finally:
        CONNECTION.close()


def reserve(plan: RankPlan) -> PlacementGroup:
    """Room for the ranks: a bundle for each stage, on different hosts where there are enough.

    Raises:
        ClusterResourcesError: there is none; says what the cluster has.
    """
    hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    ((kind, needed),) = plan.bundle.items()
    each = [host.get(kind, 0.0) for host in hosts]
    largest = max(each, default=0.0)
    if needed > largest:
        raise ClusterResourcesError(
            f"a stage's {plan.stage_size} ranks need {needed:g} {kind}s of one host, and of the "
            f"{_count(len(hosts), 'host')} of the Ray cluster none has more than {largest:g}: "
            f"lower tensor_parallel_size and raise pipeline_parallel_size, or add such a host (ray "
            f"start --address=...)"
        )
    if sum(count // needed for count in each) >= plan.num_stages:
        group = placement_group([plan.bundle] * plan.num_stages, strategy="SPREAD")
        if group.wait(PLACEMENT_SECONDS):
            return group
        remove_placement_group(group)
    free = ray.available_resources().get(kind, 0.0)
    num_ranks = plan.num_stages * plan.stage_size
    raise ClusterResourcesError(
        f"{_count(num_ranks, 'rank')} in {_count(plan.num_stages, 'stage')} "
        f"take {_count(plan.num_stages * needed, kind)}; the Ray cluster has {sum(each):g} on "
        f"{_count(len(hosts), 'host')}, {free:g} of them free: add a host (ray start "
        f"--address=...), end what else runs there (ray status), or spread the model less"
    )


def _count(number: float, thing: str) -> str:
    return f"{number:g} {thing}{'s' if number != 1 else ''}"


def _probe(address: str) -> None:
    """Ray would ask for minutes."""
    if address.startswith("ray://"):
        raise InvalidConfigError(
            f"{ADDRESS}={address} is one for clients outside of a cluster: run this on a host of "
            f"it, as steps go from here to the ranks, and leave {ADDRESS} out"
        )
    known = address or _last_cluster()
    host, _, port = known.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except OSError as error:
        if not address:
            raise InvalidConfigError(
                f"the Ray cluster that was started on this host no longer answers at {known} "
                f"({error}): start it again (ray start), or forget it (ray stop) to have one "
                f"started by the engine"
            ) from None
        raise InvalidConfigError(
            f"no Ray cluster answers at {address} ({error}): check {ADDRESS}, or leave it out to "
            f"start one on this host"
        ) from None


def _last_cluster() -> str:
    """Where Ray looks for a cluster by itself: what ``ray start`` wrote here, and a host's sudden
    end leaves behind."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    try:
        return (folder / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself, which an engine's process leaves to its server."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # another thread than the main one: Ray didn't either
            signal.signal(signal.SIGTERM, before)
