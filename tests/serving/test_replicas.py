"""A server with replicas, as a user starts it: what clients see when one of them is killed."""

import json
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from mini_infer.cli.main import main
from mini_infer.core.draft_counts import DraftCounts
from mini_infer.core.events import Admitted, DraftsVerified, Queued, StepCompleted
from mini_infer.runtime.engine import LLMEngine
from mini_infer.serving.server_metrics import ServerMetrics
from tests.serving.live import COMPLETIONS, wait_for
from tests.serving.test_faults import PROGRAM, SLOW, Server, server

pytestmark = pytest.mark.processes

TWO = ("--replicas", "2", "--router", "round_robin", "--max-num-seqs", "1", *SLOW)
OK = {"status": "ok", "replicas": ["ok", "ok"]}


def engines_of(running: Server) -> list[psutil.Process]:
    """In the order of the replicas, before any was restarted."""
    return sorted(psutil.Process(running.process.pid).children(), key=lambda one: one.pid)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def metric(running: Server, name: str) -> list[float]:
    """By replica."""
    text = running.client.get("/metrics").text
    return [float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (.*)$", text, re.MULTILINE)]


def test_a_killed_replica_ends_what_it_had_begun_and_others_take_the_rest() -> None:
    with server(*TWO, stderr=subprocess.PIPE) as running, ThreadPoolExecutor(1) as pool:
        expected = running.chat(max_tokens=30, temperature=0).json()["choices"]
        first, second = engines_of(running)
        with running.stream() as one, running.stream(max_tokens=100) as other:
            # Replica 1 has the first stream, 0 the other, and 1 a third request, which waits.
            asked = pool.submit(running.chat, max_tokens=30, temperature=0)
            wait_for(lambda: metric(running, "num_requests_waiting") == [0, 1])
            os.kill(second.pid, signal.SIGKILL)
            *_, error, done = one
            assert done == "data: [DONE]"
            fault = json.loads(error.removeprefix("data: "))["error"]
            assert fault["type"] == "service_unavailable_error"
            assert "replica 1 was killed by SIGKILL and is being restarted" in fault["message"]
            *_, finish, done = other
            assert done == "data: [DONE]"
            assert '"finish_reason":"length"' in finish
        answer = asked.result()
        assert (answer.status_code, answer.json()["choices"]) == (200, expected)
        wait_for(lambda: running.client.get("/health").json() == OK)
        engines = engines_of(running)
        assert first in engines
        assert len(engines) == 2
        assert metric(running, "num_requests_running") == [0, 0]
        assert metric(running, "num_requests_waiting") == [0, 0]
        for _ in range(2):
            assert running.chat().status_code == 200
        assert running.client.post("/reset_prefix_cache").status_code == 200
        assert running.end() == 0
        assert not any(map(is_alive, engines))
        assert running.process.stderr is not None
        log = running.process.stderr.read().splitlines()
    assert log == [
        "replica 1 was killed by SIGKILL; what it had begun ended with an error",
        "replica 1 runs again, with an empty cache",
    ]


def test_a_hung_replica_is_noticed_and_others_take_its_requests() -> None:
    program = f"import mini_infer.runtime.silence as s; s.SILENCE_SECONDS = 2.0\n{PROGRAM}"
    with server(*TWO, program=program) as running, ThreadPoolExecutor(2) as pool:
        expected = running.chat(max_tokens=30, temperature=0).json()["choices"]
        _, second = engines_of(running)
        os.kill(second.pid, signal.SIGSTOP)
        # Each gets one of them.
        asked = [pool.submit(running.chat, max_tokens=30, temperature=0) for _ in range(2)]
        wait_for(lambda: "restarted" in str(running.client.get("/health").json()["replicas"]))
        answers = [one.result() for one in asked]
        assert [answer.json()["choices"] for answer in answers] == [expected] * 2
        assert not is_alive(second)
        said = running.client.get("/health").json()["replicas"]
        assert said == ["ok", "ok"] or "replica 1 hung (no sign of life" in said[1]
        wait_for(lambda: running.client.get("/health").json() == OK)
        assert running.end() == 0


def test_while_no_replica_runs_health_says_so() -> None:
    with server(*TWO) as running:
        for engine in engines_of(running):
            engine.kill()
        wait_for(lambda: running.client.get("/health").status_code == 503)
        refused = running.chat()
        assert refused.status_code == 503
        assert "is being restarted" in refused.json()["error"]["message"]
        wait_for(lambda: running.client.get("/health").status_code == 200)
        assert running.chat().status_code == 200


def test_a_killed_server_leaves_no_replica() -> None:
    with server(*TWO) as running, running.stream(), running.stream():
        engines = engines_of(running)
        assert len(engines) == 2
        running.process.kill()
        wait_for(lambda: not any(map(is_alive, engines)))


def test_a_signal_lets_all_replicas_finish() -> None:
    with server(*TWO) as running, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True}
        asked = [pool.submit(running.client.post, COMPLETIONS, json=body) for _ in range(4)]
        wait_for(lambda: metric(running, "num_requests_waiting") == [1, 1])
        assert running.end() == 0
        assert [one.result().status_code for one in asked] == [200] * 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--router fastest", "router 'fastest' is unknown"),
        ("--replicas 2 --block-size 0", "block_size must be 1 or more"),
    ],
)
def test_what_cannot_be_started(options: str, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--port", "0", *options.split()]) == 2
    error = capfd.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_metrics_are_each_engines_and_totals_their_sum() -> None:
    config = LLMEngine.from_options(dry_run=True, speculative_config={"method": "ngram"}).config
    metrics = ServerMetrics(config, 2)
    for index, engine in enumerate(metrics.engines):
        for number in range(index + 1):
            engine.observe(Queued(1.0, f"{number}", 10))
            engine.observe(Admitted(1.0, f"{number}", 10, 4, 10))
        engine.observe(DraftsVerified(1.0, "0", 2 + index, 1))
        engine.observe(StepCompleted(1.0, 0, 10, 0, 1, 0, 5 * (index + 1), 20))
    text = metrics.render().decode()
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    for index in range(2):
        sample = f'vllm:num_requests_running{{engine="{index}",model_name="dry-run"}} {index + 1}.0'
        assert sample in text
    totals = metrics.totals()
    assert (totals.prompt_tokens, totals.prefix_cache_hits, totals.num_running) == (30, 12, 3)
    assert totals.kv_usage == pytest.approx(0.375)
    assert totals.drafts == DraftCounts(2, [2, 2, 1], [2, 0, 0], num_reached=4)
