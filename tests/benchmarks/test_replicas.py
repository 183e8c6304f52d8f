"""The benchmark of routers: simulated replicas do what real ones do, and its claim holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import replicas
from replica_simulation import Simulation, StepTime, prompt_of

from mini_infer.cli.load.trace import TracedRequest
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.routing.router import load_router


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Talks of three turns, with a first block that all share, interleaved."""
    lines = []
    for turn in range(3):
        for talk in range(41):
            block_ids = [0, *(1000 * talk + block for block in range(2 * turn + 3))]
            length = len(block_ids) * 512 - 100
            timestamp = (41 * turn + talk) * 500
            line = {"timestamp": timestamp, "input_length": length, "output_length": 3}
            lines.append(json.dumps({**line, "hash_ids": block_ids}))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_the_claim_holds_on_talks(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--trace", str(trace), "--replicas", "4", "--output", str(output)]
    replicas.main(options)
    result: dict[str, Any] = json.loads(output.read_text())
    assert [row["router"] for row in result["rows"]] == [
        "round_robin",
        "least_loaded",
        "prefix_aware",
    ]
    assert [bar["met"] for bar in result["bars"]] == [True] * 3
    for row, samples in zip(result["rows"], result["samples"].values(), strict=True):
        assert sum(one["num_requests"] for one in samples) == 123
        found = sum(one["num_cached_tokens"] for one in samples)
        total = sum(one["num_prompt_tokens"] for one in samples)
        assert row["hit rate %"] == pytest.approx(100 * found / total)
    assert result["setup"]["lengths"]["trace"] == "trace.jsonl"


def test_invented_talks_need_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    replicas.main(["--requests", "60", "--replicas", "2", "--routers", "least_loaded"])
    assert "least_loaded" in capsys.readouterr().out


def test_time_is_what_the_steps_take() -> None:
    config = LLMEngine.from_options(dry_run=True, block_size=512, num_kv_blocks=64).config
    simulation = Simulation(config, 64, 2, load_router("round_robin"), StepTime(1.0, 0.25))
    requests = [TracedRequest(0.0, 40, 3), TracedRequest(2.0, 4, 1), TracedRequest(99.0, 8, 1)]
    outcome = simulation.run(requests, speed=2.0)
    # 40 tokens take 10 s, then two steps of one token 1 s each; 4 tokens take 1 s, 8 take 2 s.
    assert outcome.times_to_first_token == pytest.approx([1.0, 10.0, 2.0])
    assert [one.busy_seconds for one in outcome.replicas] == pytest.approx([14.0, 1.0])
    assert outcome.seconds == pytest.approx(51.5)
    assert [one.num_computed_tokens for one in outcome.replicas] == [52, 5]


def test_prompts_are_equal_where_the_trace_says_so() -> None:
    one, other = TracedRequest(0, 700, 1, (5, 6)), TracedRequest(0, 1100, 1, (5, 7))
    first, second = prompt_of(one, 1), prompt_of(other, 2)
    assert (len(first), len(second)) == (700, 1100)
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])
    assert replicas.shared_rate([one, other]) == 512 / 1800
