"""/metrics: what the event stream told, under vLLM's names."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mini_infer.core.events import (
    Admitted,
    Answered,
    DraftsVerified,
    Finished,
    Preempted,
    Queued,
    Resumed,
    StepCompleted,
    TokensEmitted,
)
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.runtime.engine import LLMEngine
from mini_infer.serving.histogram import Histogram, one_two_five
from mini_infer.serving.metrics import EngineMetrics
from mini_infer.serving.server_metrics import ServerMetrics
from tests.serving.live import MODEL, LiveServer, live_server


@pytest.fixture
def fresh_server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics(LLMEngine.from_options(dry_run=True).config)


@pytest.fixture
def drafting(metrics: EngineMetrics) -> EngineMetrics:
    """Of an engine that speculates with up to three drafts."""
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    return EngineMetrics(replace(metrics._config, speculative_config=speculation))


def rendered(metrics: EngineMetrics) -> str:
    server = ServerMetrics(metrics._config)
    server.engines = [metrics]
    return server.render().decode()


def read(text: str) -> dict[str, float]:
    """Samples by name, with the finish reason, bucket or position where there is one."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels.keys() & {"finished_reason", "le", "position"}
            extra = sample.labels[labels.pop()] if labels else ""
            values[sample.name + (f"/{extra}" if extra else "")] = sample.value
    return values


def test_counts_after_some_requests(fresh_server: LiveServer) -> None:
    for _ in range(2):
        usage = fresh_server.chat(max_tokens=5, ignore_eos=True).json()["usage"]
    fresh_server.wait_until_idle()
    response = fresh_server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert f'model_name="{MODEL}"' in response.text
    values = read(response.text)
    prompt_tokens = 2 * usage["prompt_tokens"]
    assert values["vllm:prompt_tokens_total"] == prompt_tokens
    assert values["vllm:generation_tokens_total"] == 10
    assert values["vllm:request_success_total/length"] == 2
    assert values["vllm:request_success_total/stop"] == 0
    assert values["vllm:time_to_first_token_seconds_count"] == 2
    assert values["vllm:inter_token_latency_seconds_count"] == 8
    assert values["vllm:e2e_request_latency_seconds_count"] == 2
    assert values["vllm:request_generation_tokens_bucket/2.0"] == 0
    assert values["vllm:request_generation_tokens_bucket/5.0"] == 2
    assert values["vllm:prefix_cache_queries_total"] == prompt_tokens
    hits = usage["prompt_tokens_details"]["cached_tokens"]
    assert values["vllm:prefix_cache_hits_total"] == hits > 0
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == 0
    # The last token of an answer is sampled and never computed.
    computed = prompt_tokens - hits + 10 - 2
    assert values["vllm:iteration_tokens_total_sum"] == computed


def test_gauges_follow_a_request_through_its_queues(metrics: EngineMetrics) -> None:
    def gauges() -> tuple[float, float]:
        values = read(rendered(metrics))
        return values["vllm:num_requests_waiting"], values["vllm:num_requests_running"]

    seen = []
    for event in (
        Queued(1.0, "a", 10),
        Admitted(1.5, "a", 10, 4),
        Preempted(2.0, "a", 10),
        Resumed(2.5, "a", 8),
        Finished(3.0, "a", "stop", 10, 3),
        Queued(4.0, "b", 10),
        Finished(5.0, "b", "abort", 10, 0),
    ):
        metrics.observe(event)
        seen.append(gauges())
    assert seen == [(1, 0), (0, 1), (1, 0), (0, 1), (0, 0), (1, 0), (0, 0)]
    values = read(rendered(metrics))
    assert values["vllm:num_preemptions_total"] == 1


def test_times_are_those_of_the_events(metrics: EngineMetrics) -> None:
    for event in (
        Queued(1.0, "a", 10),
        Admitted(1.25, "a", 10, 0),
        TokensEmitted(2.0, "a", (5,), 1),
        TokensEmitted(2.5, "a", (5, 6), 3),
        Finished(2.75, "a", "stop", 10, 3),
    ):
        metrics.observe(event)
    values = read(rendered(metrics))
    assert values["vllm:request_queue_time_seconds_sum"] == 0.25
    assert values["vllm:time_to_first_token_seconds_sum"] == 1.0
    assert values["vllm:inter_token_latency_seconds_sum"] == 0.5
    assert values["vllm:e2e_request_latency_seconds_sum"] == 1.75
    assert values["vllm:generation_tokens_total"] == 3


def test_phases_of_a_request_add_up(metrics: EngineMetrics) -> None:
    for event in (
        Queued(1.0, "a", 10, 6),
        Admitted(1.25, "a", 10, 4),
        TokensEmitted(2.0, "a", (5,), 1),
        Preempted(2.25, "a", 11),
        Resumed(2.5, "a", 8),
        TokensEmitted(3.5, "a", (5, 6), 3),
        Finished(4.0, "a", "stop", 10, 3),
    ):
        metrics.observe(event)
    values = read(rendered(metrics))

    def total(phase: str) -> float:
        return values[f"vllm:request_{phase}_sum"]

    assert total("prefill_time_seconds") == 0.75
    assert total("decode_time_seconds") == 1.5
    assert total("inference_time_seconds") == 2.25
    assert total("time_per_output_token_seconds") == 0.75
    assert total("prefill_kv_computed_tokens") == 6
    assert total("params_max_tokens") == 6
    assert values["vllm:prompt_tokens_cached_total"] == 4


def test_a_request_without_a_token_has_no_phases(metrics: EngineMetrics) -> None:
    for event in (
        Queued(1.0, "a", 10, 6),
        Admitted(1.25, "a", 10, 4),
        Finished(4.0, "a", "abort", 10, 0),
    ):
        metrics.observe(event)
    values = read(rendered(metrics))
    for phase in ("prefill", "decode", "inference"):
        assert values[f"vllm:request_{phase}_time_seconds_count"] == 0
    assert values["vllm:e2e_request_latency_seconds_count"] == 1


def test_choices_of_a_request_count_once_where_the_caller_does(metrics: EngineMetrics) -> None:
    for index in range(3):
        metrics.observe(Queued(1.0, f"a#{index}", 10, 6, num_choices=3))
    for index, length in enumerate((2, 5, 1)):
        metrics.observe(Finished(2.0, f"a#{index}", "stop", 10, length))
    metrics.observe(Queued(3.0, "b", 10, 6))
    metrics.observe(Finished(4.0, "b", "stop", 10, 4))
    values = read(rendered(metrics))
    assert values["vllm:request_params_n_count"] == 2
    assert values["vllm:request_params_n_sum"] == 4
    assert values["vllm:request_params_max_tokens_sum"] == 24
    assert values["vllm:request_max_num_generation_tokens_count"] == 2
    assert values["vllm:request_max_num_generation_tokens_sum"] == 9


def test_old_names_have_the_new_ones_numbers(metrics: EngineMetrics) -> None:
    metrics.observe(Queued(1.0, "a", 10))
    metrics.observe(Admitted(1.0, "a", 10, 4, 10))
    metrics.observe(StepCompleted(1.0, 0, 10, 0, 1, 0, 5, 20))
    values = read(rendered(metrics))
    assert values["vllm:gpu_cache_usage_perc"] == 0.25
    assert values["vllm:gpu_prefix_cache_queries_total"] == 10
    assert values["vllm:gpu_prefix_cache_hits_total"] == 4


def test_the_cache_is_described(metrics: EngineMetrics) -> None:
    [line] = [
        line
        for line in rendered(metrics).splitlines()
        if line.startswith("vllm:cache_config_info{")
    ]
    assert line.endswith(" 1.0")
    for label in ('block_size="16"', 'enable_prefix_caching="True"', "num_gpu_blocks="):
        assert label in line


def test_kv_usage_is_a_share_and_ends_with_the_last_request(metrics: EngineMetrics) -> None:
    metrics.observe(Queued(1.0, "a", 10))
    metrics.observe(StepCompleted(1.0, 0, 10, 0, 1, 0, 5, 20))
    assert read(rendered(metrics))["vllm:kv_cache_usage_perc"] == 0.25
    metrics.observe(Finished(2.0, "a", "abort", 10, 0))
    assert read(rendered(metrics))["vllm:kv_cache_usage_perc"] == 0


def test_a_request_from_before_it_subscribed_is_ignored(metrics: EngineMetrics) -> None:
    for event in (
        Admitted(1.0, "old", 10, 0),
        TokensEmitted(1.0, "old", (5,), 1),
        Preempted(1.0, "old", 10),
        Resumed(1.0, "old", 0),
        Finished(1.0, "old", "stop", 10, 1),
        Answered(1.0, "old", "stop"),
    ):
        metrics.observe(event)
    values = read(rendered(metrics))
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:request_success_total/stop"] == 0


def test_drafts_have_the_counters_of_vllm(drafting: EngineMetrics) -> None:
    for event in (
        Queued(1.0, "a", 10),
        DraftsVerified(2.0, "a", 2, 2, 0.5, 1.5),
        DraftsVerified(3.0, "a", 3, 1, 0.5, 1.0),
        DraftsVerified(3.0, "older", 3, 3),
    ):
        drafting.observe(event)
    values = read(rendered(drafting))
    prefix = "vllm:spec_decode_num_"
    assert values[prefix + "drafts_total"] == 2
    assert values[prefix + "draft_tokens_total"] == 5
    assert values[prefix + "accepted_tokens_total"] == 3
    accepted = [values[f"{prefix}accepted_tokens_per_pos_total/{place}"] for place in range(3)]
    assert accepted == [2, 1, 0]
    own = "mini_infer:spec_decode_"
    proposed = [values[f"{own}num_draft_tokens_per_pos_total/{place}"] for place in range(3)]
    assert proposed == [2, 2, 1]
    assert (values[own + "seconds_total"], values[own + "plain_seconds_total"]) == (1.0, 2.5)


def test_drafts_are_told_of_before_there_are_any_and_only_where_they_can_be(
    metrics: EngineMetrics, drafting: EngineMetrics
) -> None:
    values = read(rendered(drafting))
    assert values["vllm:spec_decode_num_drafts_total"] == 0
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos_total/2"] == 0
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total/3" not in values
    assert not [name for name in read(rendered(metrics)) if "spec_decode" in name]


def success(server: LiveServer) -> dict[str, float]:
    values = read(server.client.get("/metrics").text)
    prefix = "vllm:request_success_total/"
    return {key.removeprefix(prefix): n for key, n in values.items() if n and prefix in key}


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [12, 20], ids=["at the last token", "before it"])
def test_a_stop_string_counts_as_the_answer_says(length: int, depth: int) -> None:
    with live_server(depth=depth) as server:
        whole = server.complete(**GREEDY).json()["choices"][0]["text"]
        [choice] = server.complete(**GREEDY | {"stop": whole[-2:], "max_tokens": length}).json()[
            "choices"
        ]
        assert choice["finish_reason"] == "stop"
        server.wait_until_idle()
        assert success(server) == {"length": 1, "stop": 1}


def test_success_counts_each_choice_and_no_refused_request(fresh_server: LiveServer) -> None:
    fresh_server.complete(n=3, **GREEDY)
    assert fresh_server.complete(max_tokens=100_000).status_code == 400
    fresh_server.wait_until_idle()
    assert success(fresh_server) == {"length": 3}


def test_a_request_that_the_scheduler_refuses_is_no_success(metrics: EngineMetrics) -> None:
    metrics.observe(Answered(1.0, "a", "abort"))
    assert read(rendered(metrics))["vllm:request_success_total/abort"] == 0


@pytest.mark.parametrize(
    ("options", "fields", "looked_up"),
    [
        ({}, {}, True),
        ({"enable_prefix_caching": False}, {}, False),
        ({}, {"prompt_logprobs": 0}, False),
    ],
    ids=["on", "off", "needs every logit"],
)
def test_prefix_cache_queries_count_look_ups_only(
    options: dict[str, Any], fields: dict[str, Any], looked_up: bool
) -> None:
    with live_server(**options) as server:
        server.complete("Hello", max_tokens=1, **fields)
        server.wait_until_idle()
        values = read(server.client.get("/metrics").text)
    assert values["vllm:prompt_tokens_total"] == 5
    assert values["vllm:prefix_cache_queries_total"] == (5 if looked_up else 0)


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram("", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == ([("1.0", 2), ("2.0", 4), ("+Inf", 5)], 14.0)


def test_token_bounds_end_at_the_context() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(64) == (1, 2, 5, 10, 20, 50)


def test_two_apps_do_not_share_a_registry(metrics: EngineMetrics) -> None:
    other = EngineMetrics(LLMEngine.from_options(dry_run=True).config)
    metrics.observe(Queued(1.0, "a", 10))
    assert read(rendered(metrics))["vllm:num_requests_waiting"] == 1
    assert read(rendered(other))["vllm:num_requests_waiting"] == 0
