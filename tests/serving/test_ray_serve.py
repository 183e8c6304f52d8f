"""Replicas under Ray Serve: what a client gets of them, how many there are, and bad options."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.llm import LLM

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from mini_infer.serving import ray_serve  # noqa: E402
from mini_infer.serving.ray_serve import ReplicaOptions, build  # noqa: E402

pytestmark = pytest.mark.processes

PROMPT = "Hello"
LIMIT = 60.0
QUICK = {"metrics_interval_s": 0.1, "look_back_period_s": 0.5}
"""Serve asks for the load every 10 s by itself, and goes by the mean of 30."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A cluster of this process, with Serve's proxy on it."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            "local",
            num_cpus=2,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        try:
            serve.start(http_options={"port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.05)


def num_replicas() -> int:
    [deployment] = serve.status().applications["default"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


@pytest.mark.filterwarnings("ignore:.*metrics_interval_s.*:DeprecationWarning")
def test_two_replicas_answer_the_openai_client(
    url: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at first, which has a queue; then two, and both are right."""
    autoscaling = ReplicaOptions.autoscaling
    monkeypatch.setattr(ReplicaOptions, "autoscaling", lambda self: autoscaling(self) | QUICK)
    options = {"model": str(tiny_folder), "device": "cpu", "kv_cache_memory": "1MiB"}
    with LLM(**options) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        expected = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    load = {"max-replicas": "2", "target_ongoing_requests": "1", "upscale_delay_s": "0"}
    serve.run(build({**options, **load, "served_model_name": "tiny"}))
    assert num_replicas() == 1
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]

    def ask(index: int) -> str:
        extra = {"ignore_eos": True}
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0, max_tokens=8, extra_body=extra
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(8) as callers:

        def scaled() -> bool:
            assert set(callers.map(ask, range(32))) == {expected}
            return num_replicas() == 2

        until(scaled)
        assert set(callers.map(ask, range(32))) == {expected}
    chunks = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=8, stream=True
    )
    assert expected.startswith("".join(chunk.choices[0].text for chunk in chunks))
    health = httpx.get(f"{url}/health", headers={"x-request-id": "mine"})
    assert (health.status_code, health.headers["x-request-id"]) == (200, "mine")
    wrong = httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": "x"})
    assert wrong.status_code == 404
    assert "other" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"modle": "x"}, "there is no option 'modle': did you mean 'model'"),
        ({"min_replicas": "3"}, r"min_replicas \(3\) must be between 0 and max_replicas \(1\)"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests 1 or more"),
        ({"tensor-parallel-size": "two"}, "tensor_parallel_size must be an integer, got 'two'"),
        ({"max_num_queued": "0"}, "--max-num-queued must be 1 or more"),
    ],
)
def test_what_can_not_be_is_refused_before_it_is_deployed(options: Any, told: str) -> None:
    with pytest.raises(InvalidConfigError, match=told):
        build({"dry_run": "true", **options})


def test_what_a_replica_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray_serve.API_KEYS, "one,two")
    monkeypatch.setattr(ray_serve, "has_gpus", lambda: True)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": "2"}
    for options, taken in (
        ({"dry_run": True, "num_cpus": 3}, {"num_cpus": 3}),
        ({"device": "cpu"}, {"num_cpus": 1}),
        (sizes, {"num_cpus": 1, "num_gpus": 4}),
        ({**sizes, "distributed_executor_backend": "ray"}, {"num_cpus": 0}),
    ):
        deployment = build(options)._bound_deployment
        assert deployment.ray_actor_options.items() >= taken.items()
        [_, server] = deployment.init_args
        assert server.api_keys == ("one", "two")
