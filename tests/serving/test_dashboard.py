"""Dashboards find what they query in /metrics: ours, and one that vLLM publishes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.live import MODEL, live_server

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"

VLLM_DASHBOARD = [
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_count",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
]
"""Queried by examples/online_serving/prometheus_grafana/grafana.json of vllm-project/vllm."""

VLLM_ENGINE = [
    "vllm:cache_config_info",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_prefill_kv_computed_tokens_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
]
"""What else vLLM's engine exposes (vllm/v1/metrics/loggers.py) and newer dashboards query."""

VLLM_SPECULATION = [
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_drafts_total",
]
"""Where speculation is configured (vllm/v1/spec_decode/metrics.py)."""

VLLM_BOUNDS = {
    "time_to_first_token_seconds": [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
    ],
    "inter_token_latency_seconds": [
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
        *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
    ],
    "e2e_request_latency_seconds": [
        *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
        *(1920, 7680),
    ],
    "request_prompt_tokens": [1, 2, 5, 10, 20, 50, 100, 200],
    "request_params_n": [1, 2, 5, 10, 20],
    "iteration_tokens_total": [1, *(8 * 2**power for power in range(12))],
}
"""From vllm/v1/metrics/loggers.py, for a ``max_model_len`` of 256."""


@pytest.fixture(scope="module")
def samples() -> Iterator[list[Any]]:
    """All that a dry run's /metrics has after a request."""
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    with live_server(max_model_len=256, speculative_config=speculation) as server:
        assert server.chat(max_tokens=5, ignore_eos=True).status_code == 200
        server.wait_until_idle()
        families = text_string_to_metric_families(server.client.get("/metrics").text)
        yield [sample for family in families for sample in family.samples]


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def queried() -> list[str]:
    names = {
        name for text in expressions() for name in re.findall(r"(?:vllm|mini_infer):\w+", text)
    }
    return sorted(names)


@pytest.mark.parametrize("name", queried())
def test_our_dashboard_queries_what_there_is(samples: list[Any], name: str) -> None:
    assert name in {sample.name for sample in samples}


@pytest.mark.parametrize("name", [*VLLM_DASHBOARD, *VLLM_ENGINE, *VLLM_SPECULATION])
def test_dashboards_of_vllm_find_what_they_query(samples: list[Any], name: str) -> None:
    found = [sample for sample in samples if sample.name == name]
    assert found
    for sample in found:
        assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "0")


@pytest.mark.parametrize("name", VLLM_BOUNDS)
def test_histograms_have_every_bound_of_vllm(samples: list[Any], name: str) -> None:
    ours = {
        float(sample.labels["le"]) for sample in samples if sample.name == f"vllm:{name}_bucket"
    }
    assert ours >= {*VLLM_BOUNDS[name], float("inf")}


def test_our_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {item["name"] for item in dashboard["templating"]["list"]}
    assert variables == {"datasource", "model_name"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len(ids)
    for panel in dashboard["panels"]:
        assert panel["type"] == "timeseries"
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0


def test_our_dashboard_shows_one_model() -> None:
    for text in expressions():
        assert len(re.findall("vllm:|mini_infer:", text)) == text.count(
            '{model_name="$model_name"}'
        )
        assert text.count("(") == text.count(")")
