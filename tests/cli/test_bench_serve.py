"""``mini-infer bench serve`` against a live dry run, and against servers that are none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_infer.cli.main import main
from mini_infer.serving.options import ServerOptions
from tests.cli.test_load import mooncake
from tests.serving.live import MODEL, LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def bench(server: LiveServer, tmp_path: Path, *options: object) -> dict[str, Any]:
    path = tmp_path / "result.json"
    arguments = ["--base-url", server.url, "--output", path, "--num-prompts", 6, *options]
    assert main(["bench", "serve", *map(str, arguments)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    assert (result["figures"]["completed"], result["figures"]["failed"]) == (6, 0)
    return result


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_lengths_are_those_asked_for(server: LiveServer, tmp_path: Path, endpoint: str) -> None:
    options = ["--endpoint", endpoint, "--input-tokens", 200, "--output-tokens", 7]
    result = bench(server, tmp_path, *options)
    assert result["settings"]["model"] == MODEL
    for request in result["requests"]:
        assert request["output_tokens"] == 7
        assert request["finish_reason"] == "length"
        assert 150 < request["prompt_tokens"] < 290, "words of about the model's tokens"
        assert 0 < request["ttft"] < request["e2el"]
    assert result["figures"]["output_tokens"] == 42
    assert set(result["figures"]["ttft_ms"]) == {"mean", "median", "p90", "p99", "max"}


def test_what_a_person_reads(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objectives = ["--goodput", "ttft:60000", "tpot:60000", "--goodput", "e2el:90000"]
    result = bench(server, tmp_path, "--output-tokens", 4, *objectives)
    assert result["figures"]["good_requests"] == 6
    out = capsys.readouterr().out
    assert "requests within the objectives" in out
    assert "time to first token, TTFT" in out
    assert "objective: 60000" in out
    assert "median" in out


def test_arrivals_and_concurrency(server: LiveServer, tmp_path: Path) -> None:
    options = ["--request-rate", 500, "--burstiness", 0.5, "--max-concurrency", 1]
    result = bench(server, tmp_path, "--output-tokens", 3, *options)
    assert result["figures"]["peak_concurrency"] == 1
    assert result["settings"]["request_rate"] == 500


def test_a_trace_and_shared_prefixes(server: LiveServer, tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl.gz")
    path = tmp_path / "traced.json"
    options = ["--dataset", "trace", "--file", trace, "--speed", 1000, "--shrink", 10]
    arguments = ["--base-url", server.url, "--output", path, *options]
    assert main(["bench", "serve", *map(str, arguments)]) == 0
    requests = json.loads(path.read_text())["requests"]
    assert [request["asked_output_tokens"] for request in requests] == [1, 1]
    options = ["--dataset", "prefix", "--num-prefixes", 1, "--input-tokens", 5]
    bench(server, tmp_path, "--output-tokens", 2, *options)


def test_a_plot(server: LiveServer, tmp_path: Path) -> None:
    path = tmp_path / "latencies.png"
    bench(server, tmp_path, "--output-tokens", 4, "--plot", path, "--goodput", "ttft:100")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_key_is_sent_and_never_stored(tmp_path: Path) -> None:
    with live_server(ServerOptions(api_keys=("secret-key",))) as server:
        result = bench(server, tmp_path, "--api-key", "secret-key", "--output-tokens", 2)
        assert "secret-key" not in json.dumps(result)
        assert main(["bench", "serve", "--base-url", server.url]) == 2


def test_failures_are_counted_and_end_with_1(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their prompts are as long as the first ones were short."""
    options = ["--input-tokens", "9000", "--num-prompts", "3", "--output-tokens", "2"]
    assert main(["bench", "serve", "--base-url", server.url, *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("1 failed: 400: prompt is too long") == 3
    assert "requests failed                            3" in captured.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--base-url http://127.0.0.1:9", "can't reach a server"),
        ("--goodput fast:3", "no objective"),
        ("ttft:3", "--goodput before it"),
        ("--extra-body [1]", "must be a JSON object"),
        ("--dataset trace", "needs a --file"),
        ("--dataset prompts --file /no/such/file", "can't read"),
        ("--plot latencies.xyz", "ending must be one of"),
        ("--plot /no/such/folder/plot.png", "can't write --plot"),
        ("--output /no/such/folder/run.json", "can't write --output"),
        ("--request-rate 0", "above 0"),
        ("--model other", "does not serve a first request: 404"),
        ("--input-tokens 0", "1"),
    ],
)
def test_bad_options(
    server: LiveServer, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "serve", "--base-url", server.url, *options.split()])
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err
