"""Rates that are measured, and forgotten."""

import pytest

from mini_infer.runtime.speculation.acceptance import Acceptance
from mini_infer.runtime.speculation.draft_record import DraftRecord


def test_a_prior_is_outweighed_by_what_is_seen() -> None:
    acceptance = Acceptance(3, [0.6], weight=2)
    assert acceptance.rates() == pytest.approx([0.6, 0.6, 0.6])
    assert acceptance.survival() == pytest.approx([0.6, 0.36, 0.216])
    for _ in range(20):
        acceptance.record(3, 0, memory=1000)
    assert acceptance.rates()[0] < 0.06


def test_only_what_follows_right_drafts_is_a_sample() -> None:
    acceptance = Acceptance(3, [0.5], weight=0.01)
    for num_accepted in (3, 1, 1, 0):
        acceptance.record(3, num_accepted, memory=1e6)
    first, second, _ = acceptance.rates()
    assert first == pytest.approx(3 / 4, abs=0.01)
    # One of three, and the rate before as one more sample.
    assert second == pytest.approx((1 + first) / (3 + 1), abs=0.01)


def test_a_change_is_followed_within_the_memory() -> None:
    acceptance = Acceptance(1, [0.5], weight=1)
    for _ in range(1000):
        acceptance.record(1, 1, memory=50)
    assert acceptance.rates()[0] > 0.99
    for _ in range(50):
        acceptance.record(1, 0, memory=50)
    assert 0.3 < acceptance.rates()[0] < 0.4  # a share of 1/e of the old ones
    acceptance.limit(8)
    assert 0.3 < acceptance.rates()[0] < 0.4
    for _ in range(8):
        acceptance.record(1, 1, memory=50)
    assert acceptance.rates()[0] > 0.6


def test_a_position_that_is_not_judged_is_believed_to_be_as_the_one_before() -> None:
    acceptance = Acceptance(2, [0.9], weight=1)
    for _ in range(20):
        acceptance.record(2, 1, memory=50)
    assert acceptance.rates()[1] < 0.2
    for _ in range(300):
        acceptance.record(1, 1, memory=50)
    assert acceptance.rates()[1] > 0.9


def test_a_step_without_a_draft_counts_in_the_yield_and_not_in_the_acceptance() -> None:
    record = DraftRecord(2)
    for _ in range(100):
        record.add(2, 2, 2, weight=1)
        record.add(0, 0, 0, weight=1)
    assert record.survival() == pytest.approx([1, 1], abs=0.01)
    assert record.expected() == pytest.approx([0.5, 0.5], abs=0.05)
    assert record.offered == pytest.approx(0.5, abs=0.05)


def test_a_short_proposal_says_nothing_of_later_positions_but_yields_nothing_there() -> None:
    record = DraftRecord(3)
    for _ in range(100):
        record.add(1, 1, 1, weight=1)
    assert record.survival() == pytest.approx([1, 1, 1], abs=0.01)
    assert record.expected() == pytest.approx([1, 0, 0], abs=0.15)


def test_a_record_begins_with_what_another_knows() -> None:
    other = DraftRecord(4)
    for _ in range(50):
        other.add(4, 4, 3, weight=1)
    new = DraftRecord(4, other)
    assert new.survival() == pytest.approx(other.survival(), abs=0.2)
    assert new.expected() == pytest.approx(other.expected(), abs=0.2)
    assert new.offered == other.offered
    for _ in range(8):
        new.add(4, 4, 0, weight=1)
    assert new.survival()[0] < 0.4 < other.survival()[0]
