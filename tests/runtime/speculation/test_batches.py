"""Batches on a device as fast as an H200 with SmolLM2-135M, of which the engine was told wrong."""

import pytest

from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from tests.runtime.speculation.test_host_gap import make_answers
from tests.runtime.speculation.timed_engine import TimedDevice, TimedEngine

ROWS = (1, 2, 4, 8, 16, 32, 64)
PLAIN = (0.36, 0.41, 0.44, 0.47, 0.53, 0.79, 1.14)
"""Milliseconds of a plain step."""
ONE_DRAFT = (1.25, 1.27, 1.3, 1.4, 1.5, 1.6, 1.8)
FOUR_DRAFTS = (1.25, 1.3, 1.4, 1.6, 1.8, 2.0, 2.2)
"""Plain steps that one takes which verifies so many of each request."""
PROPOSE = (0.0, 0.05, 0.2)
"""Milliseconds, on the device."""
HOST, LATENCY = 0.15e-3, 0.05e-3
NUM_TOKENS = 128
METHODS = {
    "host": (SpeculativeConfig(method="ngram"), 20e-6),
    "device": (SpeculativeConfig(method="early_exit", on_device=True), 8e-6),
}
"""And the seconds that the host takes more for each request with drafts."""
TOLD = {
    "true": (1.0, 1.0),
    "all too cheap": (0.7, 1.0),
    "all too dear": (1.3, 1.0),
    "drafts too cheap": (1.0, 0.7),
    "drafts too dear": (1.0, 1.3),
}
"""Factors of all steps, and of those with drafts."""


def make_costs(of_all: float = 1.0, of_drafts: float = 1.0) -> StepCosts:
    rows = zip(PLAIN, ONE_DRAFT, FOUR_DRAFTS, strict=True)
    unit = 1e-3 * of_all
    return StepCosts(
        ROWS,
        (0, 1, 4),
        tuple(
            (unit * plain, unit * of_drafts * plain * one, unit * of_drafts * plain * four)
            for plain, one, four in rows
        ),
        (tuple(unit * of_drafts * seconds for seconds in PROPOSE),) * len(ROWS),
    )


def mean_seconds(
    method: str | None, told: str, num_rows: int, acceptance: float, num_tokens: int = NUM_TOKENS
) -> float:
    """From a request's first token to its last."""
    config, draft_host = METHODS[method] if method else (None, 0.0)
    costs = make_costs(*TOLD[told])
    device = TimedDevice(make_costs(), costs, HOST, LATENCY, draft_host, acceptance)
    engine = TimedEngine(device, config, max_num_seqs=64, max_num_batched_tokens=64 * 600)
    times = engine.times(*make_answers(acceptance, num_rows, num_tokens))
    return sum(end - begin for begin, end in times) / num_rows


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
def test_no_batch_is_slower_by_more_than_two_percent_and_a_few_steps(
    num_rows: int, acceptance: float
) -> None:
    plain = mean_seconds(None, "true", num_rows, acceptance)
    for method in METHODS:
        for told in TOLD:
            drafted = mean_seconds(method, told, num_rows, acceptance)
            assert drafted < 1.02 * plain + 4 * plain / NUM_TOKENS, (method, told)


@pytest.mark.parametrize(
    ("method", "num_rows", "acceptance", "least"),
    [
        ("host", 1, 0.9, 1.4),
        ("host", 2, 0.9, 1.3),
        ("host", 4, 0.9, 1.15),
        ("device", 1, 0.6, 1.08),
        ("device", 2, 0.6, 1.08),
        ("device", 4, 0.6, 1.08),
        ("device", 1, 0.9, 1.8),
        ("device", 4, 0.9, 1.8),
    ],
)
def test_small_batches_gain_whatever_the_engine_is_told(
    method: str, num_rows: int, acceptance: float, least: float
) -> None:
    plain = mean_seconds(None, "true", num_rows, acceptance, 256)
    for told in TOLD:
        assert plain > least * mean_seconds(method, told, num_rows, acceptance, 256), told
