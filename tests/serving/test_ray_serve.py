"""The application for Ray Serve: what it takes and refuses. ``tests/test_ray.py`` runs it."""

from pathlib import Path
from typing import Any

import pytest

from mini_infer.core.errors import InvalidConfigError

pytest.importorskip("ray.serve")

from mini_infer.serving import ray_serve
from mini_infer.serving.ray_serve import build


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"modle": "x"}, "there is no option 'modle': did you mean 'model'"),
        ({"min_replicas": "3"}, r"min_replicas \(3\) must be between 0 and max_replicas \(1\)"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests 1 or more"),
        ({"tensor-parallel-size": "two"}, "tensor_parallel_size must be an integer, got 'two'"),
        ({"max_num_queued": "0"}, "--max-num-queued must be 1 or more"),
        ({"min_replicas": "one"}, "min_replicas='one': Expected `int`, got `str`"),
        ({"request_timeout": "soon"}, "request_timeout='soon': Expected `float | null`"),
        ({"router": "least_loaded"}, "Ray Serve chooses a replica"),
        ({"port": "9000"}, "http_options.port of its file"),
    ],
)
def test_what_can_not_be_is_refused_before_it_is_deployed(options: Any, told: str) -> None:
    with pytest.raises(InvalidConfigError, match=told):
        build({"dry_run": "true", **options})


def test_texts_are_values_of_the_options_kinds(tmp_path: Path) -> None:
    options = {"request_timeout": "2", "access_log": "true", "profile_folder": str(tmp_path)}
    [_, server] = build({"dry_run": "true", **options})._bound_deployment.init_args
    assert server.request_timeout == 2.0
    assert server.access_log is True
    assert server.profile_folder == tmp_path


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
