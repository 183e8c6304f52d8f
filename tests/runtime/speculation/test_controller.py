"""How many drafts, for made-up costs and acceptance."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS, SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.speculation.controller import DraftController
from tests.runtime.speculation.simulation import device_speedup, make_costs


def controller(costs: StepCosts | None = None, **options: object) -> DraftController:
    config = SpeculativeConfig(method="early_exit", on_device=True, **options)  # type: ignore[arg-type]
    return DraftController(config, costs or make_costs())


def teach(ours: DraftController, num_accepted: int, num_times: int = 200, most: int = 4) -> None:
    for _ in range(num_times):
        ours.record(most, num_accepted)


@pytest.mark.parametrize(
    ("acceptance", "expected"), [(0.0, 0), (0.3, 0), (0.55, 1), (0.8, 3), (0.95, 4)]
)
def test_it_chooses_what_makes_most_tokens_per_second(acceptance: float, expected: int) -> None:
    gains = [
        sum(acceptance**position for position in range(count + 1)) / (1 + 0.353 * count)
        for count in range(5)
    ]
    count, gain = controller().best(1, [acceptance ** (position + 1) for position in range(4)])
    assert count == expected
    assert gain == pytest.approx(gains[count]) == pytest.approx(max(gains))


def test_acceptance_that_is_measured_decides() -> None:
    ours = controller()
    teach(ours, num_accepted=4)
    assert ours.num_drafts(1) == 4
    teach(ours, num_accepted=1)
    assert ours.num_drafts(1) == 1
    teach(ours, num_accepted=0)
    assert [ours.num_drafts(1) for _ in range(20)].count(0) >= 19


def test_a_batch_that_grows_has_fewer_drafts_and_then_none() -> None:
    ours = controller(make_costs(verify=0.2, propose=0.1))
    teach(ours, num_accepted=3)
    counts = []
    for num_rows in (1, 8, 16, 32, 64):
        counts.append(ours.num_drafts(num_rows))
        teach(ours, num_accepted=3, num_times=num_rows)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 3
    assert counts[-1] == 0
    assert ours.num_drafts(1) == counts[0]


@pytest.mark.parametrize("adaptive", [False, True])
def test_above_the_most_rows_nobody_has_drafts(adaptive: bool) -> None:
    ours = controller(make_costs(verify=0.0, propose=0.0), adaptive=adaptive)
    assert ours.num_drafts(MAX_SPECULATING_ROWS) == 4
    assert ours.num_drafts(MAX_SPECULATING_ROWS + 1) == 0
    assert ours.num_drafts(0) == 0


def test_what_is_not_adaptive_does_not_adapt() -> None:
    ours = controller(adaptive=False, num_speculative_tokens=7)
    teach(ours, num_accepted=0)
    assert [ours.num_drafts(1) for _ in range(50)] == [7] * 50


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 5, 16])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_each_number_is_one_that_there_is_a_graph_for(
    num_speculative_tokens: int, num_rows: int
) -> None:
    ours = controller(num_speculative_tokens=num_speculative_tokens)
    for step in range(200):
        count = ours.num_drafts(num_rows)
        assert count in ours._config.draft_counts
        if count:
            for row in range(num_rows):
                ours.record(count, (step * row) % (count + 1))


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_step_that_has_room_for_few_drafts_has_few(adaptive: bool) -> None:
    ours = controller(make_costs(verify=0.0, propose=0.0), adaptive=adaptive)
    teach(ours, num_accepted=4)
    assert [ours.num_drafts(1, most) for most in (0, 1, 3, 9)] == [0, 1, 3, 4]


def test_what_pays_with_many_drafts_only_is_left_where_there_is_room_for_few() -> None:
    """Verifying is dear as soon as there is a draft, and no dearer with more of them."""
    costs = StepCosts((1,), (0, 1, 4), ((1.0, 2.2, 2.2),), ((0.0, 0.0, 0.0),))
    ours = controller(costs)
    teach(ours, num_accepted=4)
    assert ours.num_drafts(1) == 4
    assert ours.num_drafts(1, 1) == 0


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_that_are_never_right_cost_less_than_a_hundredth(num_rows: int, depth: int) -> None:
    assert device_speedup(lambda step, position: 0.0, 3000, num_rows, depth=depth) > 0.99


def test_good_drafts_reach_nearly_what_they_can() -> None:
    steady = device_speedup(lambda step, position: 0.9, 2000)
    fixed = device_speedup(lambda step, position: 0.9, 2000, adaptive=False)
    assert steady > 0.97 * fixed > 1.5


def test_it_finds_out_when_drafts_become_good_and_when_bad() -> None:
    late = device_speedup(lambda step, position: 0.9 * (step > 1000), 2000)
    assert late > 1.2  # 1.7 in the second half
    early = device_speedup(lambda step, position: 0.9 * (step < 1000), 2000)
    assert early > 1.25


def test_probes_become_rarer_but_do_not_end() -> None:
    ours = controller()
    probes = []
    for step in range(5000):
        if ours.num_drafts(1):
            probes.append(step)
            ours.record(1, 0)
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert gaps[-1] == max(gaps) > 3 * min(gaps)
    assert 10 < len(probes) < 60


def test_where_even_right_drafts_lose_there_are_no_probes() -> None:
    ours = controller(make_costs(propose=1.1))
    assert not any(ours.num_drafts(1) for _ in range(3000))


@settings(max_examples=40, deadline=None)
@given(
    phases=st.lists(
        st.tuples(st.integers(1, 400), st.floats(0.0, 1.0), st.floats(0.3, 1.0)),
        min_size=1,
        max_size=6,
    ),
    num_rows=st.sampled_from([1, 2, 5, 33]),
    verify=st.floats(0.0, 0.5),
    propose=st.floats(0.0, 1.5),
    depth=st.integers(1, 3),
    most=st.sampled_from([1, 4, 8]),
)
def test_it_is_never_slower_than_plain_decoding_by_more_than_two_percent(
    phases: list[tuple[int, float, float]],
    num_rows: int,
    verify: float,
    propose: float,
    depth: int,
    most: int,
) -> None:
    period = sum(length for length, _, _ in phases)

    def acceptance(step: int, position: int) -> float:
        step %= period
        for length, rate, decline in phases:
            if step < length:
                return rate * decline**position
            step -= length
        raise AssertionError

    costs = make_costs(verify, propose)
    speedup = device_speedup(acceptance, 1500, num_rows, costs, depth, most)
    assert speedup > 0.98


def test_the_same_happens_again_and_again() -> None:
    def once() -> float:
        return device_speedup(lambda step, position: (step % 7) / 7, 500)

    assert once() == once()


def test_seconds_are_those_of_the_costs() -> None:
    costs = make_costs()
    ours = controller(costs)
    assert ours.plain_seconds(8) == costs.verify_seconds(8, 0)
    assert ours.seconds(8, 2) == costs.verify_seconds(8, 2) + costs.propose_seconds(8, 2)


def test_a_hosts_step_takes_what_it_is_seen_to_take() -> None:
    costs = make_costs()
    ours = DraftController(SpeculativeConfig(method="ngram"), costs)
    assert ours.seconds(8, 2) == costs.verify_seconds(
        8, 2
    )  # the host's proposals are not the device's
    for _ in range(99):
        ours.end_step(8, 0, 1.1 * costs.verify_seconds(8, 0))
    for _ in range(99):
        ours.end_step(8, 2, 1.1 * costs.verify_seconds(8, 2) + 0.25)
    assert ours.plain_seconds(8) == pytest.approx(1.1 * costs.verify_seconds(8, 0), rel=0.01)
    assert ours.seconds(8, 2) == pytest.approx(1.1 * costs.verify_seconds(8, 2) + 0.25, rel=0.01)
    before = ours.seconds(8, 2)
    ours.end_step(8, 2, None)  # nobody knows
    ours.end_step(8, 2, 1000.0)  # something else happened
    assert before < ours.seconds(8, 2) < before + 0.2


def test_without_costs_it_assumes_some_and_tells_none() -> None:
    ours = DraftController(SpeculativeConfig(method="early_exit", on_device=True), None)
    teach(ours, num_accepted=4)
    assert ours.num_drafts(1) == 4
    assert ours.seconds(1, 4) == ours.plain_seconds(1) == 0.0


def test_extrapolated_noise_is_no_time_below_zero() -> None:
    costs = StepCosts((1, 4), (0, 4), ((1.0, 1.1), (0.9, 1.0)), ((0.0, 0.1), (0.0, 0.1)))
    ours = controller(costs)
    teach(ours, num_accepted=4)
    assert ours.plain_seconds(64) == 1.0
    assert ours.num_drafts(64) == 4
