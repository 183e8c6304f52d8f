"""The parts of ``mini-infer bench serve``: arrivals, workloads, traces and figures."""

import gzip
import json
import random
import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mini_infer.cli.load.arrivals import arrival_times
from mini_infer.cli.load.client import Record
from mini_infer.cli.load.figures import Objective, figures, peak_concurrency, percentile
from mini_infer.cli.load.run import Job, Target
from mini_infer.cli.load.trace import read_trace, trace_jobs
from mini_infer.cli.load.workload import (
    Lengths,
    Words,
    prefix_jobs,
    prompt_jobs,
    random_jobs,
    repeated,
    sharegpt_jobs,
)
from mini_infer.core.errors import InvalidConfigError

INFINITE = float("inf")


def gaps(rate: float, burstiness: float) -> list[float]:
    times = list(arrival_times(4001, rate, burstiness, random.Random(0)))
    assert times[0] == 0
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (25.0, 0.2)])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float, variation: float) -> None:
    """A gamma distribution's coefficient of variation is one over the root of its shape."""
    found = gaps(8.0, burstiness)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8, rel=0.08)
    assert statistics.stdev(found) / mean == pytest.approx(variation, rel=0.08)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert list(arrival_times(3, INFINITE, 1.0, random.Random(0))) == [0, 0, 0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1)])
def test_impossible_arrivals(rate: float, burstiness: float) -> None:
    with pytest.raises(InvalidConfigError, match="above 0"):
        list(arrival_times(3, rate, burstiness, random.Random(0)))


def test_words_are_counted_in_the_models_tokens() -> None:
    text = Words(tokens_per_word=4.0).text(random.Random(0), 100)
    assert len(text.split()) == 25


def test_lengths_stay_within_their_spread() -> None:
    rng = random.Random(0)
    drawn = [Lengths(100, 10, 0.5).draw(rng) for _ in range(200)]
    assert {min(p for p, _ in drawn) >= 50, max(p for p, _ in drawn) <= 150} == {True}
    assert {5, 15} <= {output for _, output in drawn} <= set(range(5, 16))
    assert Lengths(7, 3).draw(rng) == (7, 3)


def test_random_prompts_share_nothing_and_prefixes_are_shared() -> None:
    rng = random.Random(0)
    plain = repeated(random_jobs(Words(), Lengths(50, 8), rng), 20)
    assert len({job.prompt[:80] for job in plain}) == 20
    shared = repeated(prefix_jobs(Words(), Lengths(5, 8), rng, 3, 40), 60)
    starts = {" ".join(job.prompt.split()[:40]) for job in shared}
    assert len(starts) == 3
    assert all(len(job.prompt.split()) == 45 for job in shared)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"turns": ["two", "more"], "category": "x"}\nthree\n')
    jobs = prompt_jobs(path, Lengths(1, 9), random.Random(0))
    assert {(job.prompt, job.num_output_tokens) for job in jobs} == {
        ("one", 9),
        ("two", 9),
        ("three", 9),
    }
    assert [job.prompt for job in repeated(jobs, 5)[3:]] == [job.prompt for job in jobs[:2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"prompt": 3}', "line 1"), ('{"turns": []}', "line 1"), ("{", "line 1"), ("\n", "nothing")],
)
def test_files_without_prompts(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=message):
        prompt_jobs(path, Lengths(1, 1), random.Random(0))


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="No such file"):
        prompt_jobs(tmp_path / "none", Lengths(1, 1), random.Random(0))
    broken = tmp_path / "trace.jsonl.gz"
    broken.write_bytes(b"no gzip")
    with pytest.raises(InvalidConfigError, match="can't read"):
        read_trace(broken)


def test_sharegpts_conversations(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because of that."}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    (job,) = sharegpt_jobs(path, Words(tokens_per_word=2.0), random.Random(0))
    assert job == Job("Why?", 6)
    path.write_text('{"a": 1}')
    with pytest.raises(InvalidConfigError, match="no list of ShareGPT"):
        sharegpt_jobs(path, Words(), random.Random(0))


def mooncake(path: Path) -> Path:
    lines = [
        {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [1, 7]},
        {"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_mooncakes_trace(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl.gz")
    first, second = trace_jobs(path, Words(), 10, speed=4.0)
    assert (first.arrival, second.arrival) == (0.0, 0.5)
    assert [len(job.prompt.split()) for job in (first, second)] == [600, 700]
    assert first.prompt.split()[:512] == second.prompt.split()[:512], "equal ids, equal texts"
    assert first.prompt.split()[512:540] != second.prompt.split()[512:540]
    (short,) = trace_jobs(path, Words(), 1, shrink=10.0)
    assert (len(short.prompt.split()), short.num_output_tokens) == (60, 1)


def test_azures_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = trace_jobs(path, Words(), 10)
    assert (len(first.prompt.split()), second.num_output_tokens) == (374, 109)
    assert second.arrival == pytest.approx(4.314579)
    assert first.prompt.split()[:20] != second.prompt.split()[:20]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"timestamp": 1}\n', "\n"])
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=r"no trace|nothing to send"):
        trace_jobs(path, Words(), 1)


def record(start: float, ttft: float, itls: list[float], **fields: object) -> Record:
    latency = ttft + sum(itls)
    found = Record(start, ttft, itls, latency, num_prompt_tokens=10)
    found.num_output_tokens = len(itls) + 1
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def test_figures_are_vllms() -> None:
    records = [
        record(0.0, 0.1, [0.01, 0.03]),
        record(0.5, 0.3, [0.02] * 4),
        record(0.6, 0.2, []),
        record(0.7, 9.0, [], error="500: no"),
    ]
    found = figures(records, [Objective("ttft", 250), Objective("tpot", 20.5)])
    assert (found["completed"], found["failed"], found["errors"]) == (3, 1, {"500: no": 1})
    assert found["output_tokens"] == 3 + 5 + 1
    assert found["seconds"] == pytest.approx(9.7)
    assert found["output_tokens_per_second"] == pytest.approx(9 / 9.7)
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["ttft_ms"]["p90"] == pytest.approx(np.percentile([100, 300, 200], 90))
    assert found["tpot_ms"]["median"] == pytest.approx(20), "an answer of one token has none"
    assert found["itl_ms"]["max"] == pytest.approx(30)
    assert found["e2el_ms"]["max"] == pytest.approx(380)
    assert found["good_requests"] == 2, "the second one's first token came too late"
    assert found["goodput"] == pytest.approx(2 / 9.7)


def test_each_gap_must_meet_an_objective_on_gaps() -> None:
    assert not Objective("itl", 20).is_met(record(0, 0.1, [0.01, 0.03]))
    assert Objective("itl", 30.1).is_met(record(0, 0.1, [0.01, 0.03]))
    assert Objective("e2el", 141).is_met(record(0, 0.1, [0.01, 0.03]))


def test_a_run_of_nothing() -> None:
    found = figures([])
    assert (found["completed"], found["output_tokens_per_second"]) == (0, 0.0)
    assert found["ttft_ms"] == {}


@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(percent: int) -> None:
    values = [random.Random(0).random() for _ in range(17)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_peak_concurrency() -> None:
    assert peak_concurrency([record(0, 1, []), record(0.5, 1, []), record(1.2, 1, [])]) == 2


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:3", "tpot:0", "tpot:-1", ""])
def test_bad_objectives(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="ttft:200"):
        Objective.parse(text)


@pytest.mark.parametrize(
    "base_url", ["http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"]
)
def test_the_address_may_end_as_openais_clients_want_it(base_url: str) -> None:
    assert Target(base_url, "chat", {}).url == "http://x:1/v1/chat/completions"
