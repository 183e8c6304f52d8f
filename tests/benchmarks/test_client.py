from collections.abc import Iterator

import pytest
from client import Client, Job, Trace, serve, serve_in_groups

from mini_infer import LLM
from mini_infer.core.events import (
    Admitted,
    Event,
    Finished,
    Queued,
    TokensEmitted,
)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(dry_run=True, max_model_len=64, max_num_seqs=8) as engine:
        yield engine


def jobs(*lengths: int) -> list[Job]:
    return [Job([index + 1, 2, 3], length) for index, length in enumerate(lengths)]


@pytest.fixture
def trace() -> Trace:
    trace = Trace()
    events: list[Event] = [
        Queued(10.0, "a", 5),
        Queued(11.0, "b", 5),
        Admitted(11.0, "a", 5, 4),
        TokensEmitted(12.0, "a", (1,), 1),
        TokensEmitted(13.0, "b", (1,), 1),
        TokensEmitted(12.5, "a", (2, 3), 3),
        TokensEmitted(16.5, "a", (4,), 4),
        Finished(16.5, "a", "length", 5, 4),
        Finished(20.0, "b", "length", 5, 1),
    ]
    for event in events:
        trace.observe(event)
    return trace


def test_trace_measures_from_first_queued_to_last_finished(trace: Trace) -> None:
    assert trace.seconds == 10.0
    assert trace.num_output_tokens == 5
    assert trace.output_tokens_per_second == 0.5
    assert trace.time_to_first_token("a") == 2.0
    assert trace.cached == {"a": 4}


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [(0, 99, [0.5, 4.0]), (12.5, 99, [4.0]), (0, 12.5, [0.5]), (13, 14, [4.0]), (17, 99, [])],
)
def test_gaps_that_overlap_the_window(
    trace: Trace, since: float, until: float, expected: list[float]
) -> None:
    assert trace.inter_token_latencies(["a", "b"], since, until) == expected


@pytest.mark.parametrize("concurrency", [1, 2, 3, 7])
def test_serve_keeps_to_its_concurrency(llm: LLM, concurrency: int) -> None:
    client = serve(llm, jobs(3, 9, 1, 4, 6, 2, 5), concurrency)
    assert len(client.outputs) == 7
    assert client.trace.num_output_tokens == 30
    assert most_at_once(client.trace) == min(concurrency, 7)


def most_at_once(trace: Trace) -> int:
    """How many requests were queued and unfinished together, at most."""
    return max(
        sum(trace.queued[name] <= moment and trace.finished[name] > moment for name in trace.queued)
        for moment in trace.queued.values()
    )


def test_static_groups_wait_for_their_longest(llm: LLM) -> None:
    trace = serve_in_groups(llm, jobs(2, 9, 3, 4, 1), 2).trace
    names = list(trace.queued)
    for group, following in ((names[:2], names[2:4]), (names[2:4], names[4:])):
        last_end = max(trace.finished[name] for name in group)
        assert all(trace.queued[name] >= last_end for name in following)


def test_every_output_has_its_full_length(llm: LLM) -> None:
    client = serve(llm, jobs(1, 5, 12))
    assert [len(output.outputs[0].token_ids) for output in client.outputs.values()] == [1, 5, 12]
    assert {output.outputs[0].finish_reason for output in client.outputs.values()} == {"length"}


def test_each_run_starts_with_an_empty_prefix_cache(llm: LLM) -> None:
    repeated = [Job(list(range(1, 50)), 1)]
    assert list(serve(llm, repeated).trace.cached.values()) == [0]
    assert list(serve(llm, repeated).trace.cached.values()) == [0]


def test_a_closed_client_hears_nothing_more(llm: LLM) -> None:
    with Client(llm) as client:
        client.send(jobs(2)[0])
        client.drain()
    serve(llm, jobs(5))
    assert client.trace.num_output_tokens == 2


def test_a_failed_step_ends_the_benchmark(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("broken kernel")

    monkeypatch.setattr(llm.engine.core.executor, "submit", fail)
    with pytest.raises(SystemExit, match="broken kernel"):
        serve(llm, jobs(2))
