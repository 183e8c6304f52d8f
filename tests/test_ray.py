"""A Ray cluster of two nodes on this machine. Ranks on both say what one process says; faults end
in a clear error, with nothing left behind, and in another engine once there is room. And Ray Serve.
"""

import contextlib
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import psutil
import pytest

from mini_infer.core.errors import ClusterResourcesError, EngineDeadError, InvalidConfigError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.parallel.group import COLLECTIVE_SECONDS
from mini_infer.runtime import engine_restarts
from mini_infer.runtime import ranks as watched
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.llm import LLM
from tests.runtime.engine_tools import greedy, run
from tests.runtime.fake_executor import make_config
from tests.runtime.faulty_ranks import NeverStarts
from tests.runtime.test_engine_process import running, text_of, until

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import RayError  # noqa: E402

from mini_infer.runtime import ray_cluster, ray_executor  # noqa: E402
from mini_infer.runtime.ray_cluster import RankPlan  # noqa: E402
from mini_infer.runtime.ray_executor import RayExecutor, RayRanks  # noqa: E402
from mini_infer.runtime.ray_rank import gpu_index, interface_of  # noqa: E402
from mini_infer.serving.ray_serve import ReplicaOptions, build  # noqa: E402

pytestmark = pytest.mark.processes

LIMIT = 10.0
"""Seconds from a fault to its error."""
NODE = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
QUICK_RAY = {
    # By itself Ray takes 15 s to see that a node is gone,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
    # and gives a process that does not end by itself 5 s.
    "kill_worker_timeout_milliseconds": 500,
}
QUICK = {"metrics_interval_s": 0.1, "look_back_period_s": 0.5}
"""Serve looks at the load every 10 s by itself, and at the mean of 30."""
PATIENCE = 60.0
PROMPT = [5, 6, 7, 8]
NOTHING = ModelFiles(Path("unused"), Path("unused"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without cores, and two nodes with one core each."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,  # sockets' paths have 107 bytes
        pytest.MonkeyPatch.context() as patch,
    ):
        (Path(folder) / "ray").mkdir()
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(ray_cluster.NICENESS, "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        head = {**NODE, "num_cpus": 0, "num_gpus": 0, "_system_config": QUICK_RAY}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            patch.setenv(ray_cluster.ADDRESS, cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_restarts, "FIRST_DELAY", 0.001)


def executor(**options: Any) -> RayExecutor:
    sizes = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    return RayExecutor(make_config(**{**sizes, **options}), NOTHING)


def engine_over(executor: RayExecutor) -> LLMEngine:
    return LLMEngine(executor._config, executor, ByteTokenizer())


def assert_gone(pids: Iterable[int]) -> None:
    """Ray ends processes in its own time."""
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(there, LIMIT)
    assert not alive


def test_the_limits_leave_room() -> None:
    assert COLLECTIVE_SECONDS + RayRanks.grace_seconds < LIMIT
    assert ray_cluster.PLACEMENT_SECONDS + ray_cluster.PROBE_SECONDS < LIMIT


@pytest.mark.real_model
async def test_a_node_of_a_real_model_is_killed_and_another_one_takes_its_place(
    cluster: Cluster, real_model_folder: Path
) -> None:
    options = {
        "model": str(real_model_folder),
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory": 2**24,
    }
    params = SamplingParams(temperature=0, max_tokens=12)
    prompt = "The capital of France is"
    with LLM(**options) as llm:
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
    ranks = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    async with running({**options, **ranks}) as engine:
        assert await text_of(engine, prompt, params) == expected
        begin = time.monotonic()
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        endless = SamplingParams(max_tokens=200, ignore_eos=True)  # not over before it is noticed
        with pytest.raises(EngineDeadError, match="being restarted"):
            await text_of(engine, prompt, endless)
        assert time.monotonic() - begin < LIMIT
        assert not engine.healthy
        cluster.add_node(**NODE)
        await until(lambda: engine.healthy)
        assert await text_of(engine, prompt, params) == expected


def test_a_killed_rank_is_named_with_its_host(cluster: Cluster) -> None:
    engine = engine_over(ranks := executor())
    seats = ranks.ranks.seats
    assert len({seat.pid for seat in seats}) == 2
    engine.add_request("good", PROMPT, greedy(4))
    assert run(engine)["good"].outputs[0].finish_reason == "length"
    psutil.Process(seats[1].pid).kill()
    engine.add_request("late", PROMPT, greedy(4))
    begin = time.monotonic()
    told = rf"rank 1 \(stage 1 of 2\) \(process {seats[1].pid} on {seats[1].host}\) is gone: .*died"
    with pytest.raises(EngineDeadError, match=told):
        run(engine)
    assert time.monotonic() - begin < LIMIT
    assert not ray.is_initialized()
    engine.shutdown()
    assert_gone(seat.pid for seat in seats)


def test_a_stopped_rank_is_ended(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "SILENCE_SECONDS", 2.0)  # a test of the processes has the real one
    engine = engine_over(ranks := executor(tensor_parallel_size=1))
    pids = [seat.pid for seat in ranks.ranks.seats]
    psutil.Process(pids[1]).suspend()
    engine.add_request("late", PROMPT, greedy(4))
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* has given no sign of life for"):
        run(engine)
    assert time.monotonic() - begin < LIMIT
    engine.shutdown()
    assert_gone(pids)


ENGINE = """
import sys, time
sys.path[:0] = {path!r}
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.runtime.ray_cluster import RankPlan  # noqa: E402
from mini_infer.runtime.ray_executor import RayExecutor
from tests.runtime.fake_executor import make_config
ranks = RayExecutor(make_config(distributed_executor_backend="ray"), ModelFiles(None, None))
ranks.start()
print(ranks.ranks.seats[0].pid, flush=True)
time.sleep(60)
"""


def test_ranks_end_with_their_engine_and_their_place_is_free(cluster: Cluster) -> None:
    program = ENGINE.format(path=sys.path)
    engine = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    engine.kill()
    engine.wait()
    assert_gone([pid])
    ray.init(cluster.address, logging_level=logging.ERROR)
    try:
        wait_until(lambda: ray.available_resources().get("CPU") == len(cluster.worker_nodes))
    finally:
        ray.shutdown()


def test_a_rank_on_a_gpu_sees_those_of_the_others_of_its_stage(cluster: Cluster) -> None:
    """GPUs that Ray was told of, and nobody uses."""
    ranks = RayRanks(RankPlan(num_stages=1, stage_size=2, on_gpus=True, num_cpus=1))
    try:
        assert {seat.gpu for seat in ranks.seats} == {0, 1}
        assert "GPU" in ranks.name(1)
    finally:
        ranks.close()


def test_too_small_a_cluster_is_refused_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sizes, told in (
        ({"pipeline_parallel_size": 3}, "3 ranks in 3 stages take 3 CPUs; .* has 2 on 3 hosts"),
        ({"tensor_parallel_size": 2}, "2 ranks need 2 CPUs of one host, .* none has more than 1:"),
    ):
        with pytest.raises(ClusterResourcesError, match=told):
            executor(**{"pipeline_parallel_size": 1, **sizes}).start()
    there = executor(pipeline_parallel_size=1)
    there.start()
    monkeypatch.setattr(ray_cluster, "PLACEMENT_SECONDS", 0.5)
    with pytest.raises(ClusterResourcesError, match=r"2 on 3 hosts, 1 of them free: add a host"):
        executor().start()
    there.shutdown()
    assert not ray.is_initialized()


def test_a_rank_that_can_not_start_says_why(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "RayRank", NeverStarts)
    with pytest.raises(EngineDeadError, match=r"can't be started: .* No module named 'mini_infer'"):
        executor(pipeline_parallel_size=1).start()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at"),
        ("ray://127.0.0.1:10001", "run this on a host of it"),
    ],
)
def test_no_cluster_at_the_address(
    address: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ray_cluster.ADDRESS, address)
    with pytest.raises(InvalidConfigError, match=told):
        executor().start()


def test_a_cluster_that_has_left_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv(ray_cluster.ADDRESS, raising=False)
    with pytest.raises(InvalidConfigError, match=r"no longer answers at 127.0.0.1:1 .*ray stop"):
        executor().start()


def test_ranks_of_a_cluster_that_is_started_here_are_as_important_as_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (ray_cluster.ADDRESS, ray_cluster.NICENESS):
        monkeypatch.delenv(name, raising=False)
    found: list[str | None] = []

    def init(*_: object, **__: object) -> None:
        found.append(os.environ.get(ray_cluster.NICENESS))
        raise ConnectionError("not here")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_probe", lambda address: None)
    with pytest.raises(InvalidConfigError, match="not here"):
        executor().start()
    assert found == ["0"]


def test_a_cluster_whose_token_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = RayError("authentication token is missing")
    monkeypatch.setattr(ray, "init", Mock(side_effect=refusal))
    with pytest.raises(InvalidConfigError, match=r"token is missing.*give it .*auth_token"):
        executor().start()


def test_a_host_has_its_interface_and_a_rank_its_gpu() -> None:
    assert interface_of("127.0.0.1") in psutil.net_if_addrs()
    assert interface_of("203.0.113.1") is None
    assert gpu_index("3", None) == 3
    assert gpu_index("3", "2,3") == 1


def free_port() -> int:
    """One that no system hands out by itself: Ray's processes ask for theirs before Serve binds."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as unused, contextlib.suppress(OSError):
            unused.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.fixture
def url(cluster: Cluster) -> Iterator[str]:
    """Of Ray Serve's proxy."""
    port = free_port()
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def num_replicas() -> int:
    [deployment] = serve.status().applications["default"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


@pytest.mark.filterwarnings("ignore:.*metrics_interval_s.*:DeprecationWarning")
def test_two_replicas_answer_the_openai_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at first, which has a queue; then two, and both are right."""
    autoscaling = ReplicaOptions.autoscaling
    monkeypatch.setattr(ReplicaOptions, "autoscaling", lambda self: autoscaling(self) | QUICK)
    with LLM(dry_run=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        expected = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].text
    load = {"max-replicas": "2", "target_ongoing_requests": "1", "upscale_delay_s": "0"}
    serve.run(build({"dry_run": "true", "served_model_name": "tiny", **load}))
    assert num_replicas() == 1
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]

    def ask(index: int) -> str:
        extra = {"ignore_eos": True}
        answer = client.completions.create(
            model="tiny", prompt="Hello", temperature=0, max_tokens=8, extra_body=extra
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(8) as callers:

        def scaled() -> bool:
            assert set(callers.map(ask, range(32))) == {expected}
            return num_replicas() == 2

        wait_until(scaled)
        assert set(callers.map(ask, range(32))) == {expected}
    chunks = client.completions.create(
        model="tiny", prompt="Hello", temperature=0, max_tokens=8, stream=True
    )
    assert expected.startswith("".join(chunk.choices[0].text for chunk in chunks))
    health = httpx.get(f"{url}/health", headers={"x-request-id": "mine"})
    assert (health.status_code, health.headers["x-request-id"]) == (200, "mine")
    wrong = httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": "x"})
    assert wrong.status_code == 404
    assert "other" in wrong.json()["error"]["message"]
