"""Counts of drafts: what the numbers that users see are made of."""

import pytest

from mini_infer.core.draft_counts import DraftCounts


def test_counts_by_position() -> None:
    counts = DraftCounts()
    counts.add(3, 2)
    counts.add(1, 0)
    counts.add(2, 2)
    assert counts.num_verifications == 3
    assert (counts.proposed, counts.accepted) == ([3, 2, 1], [2, 2, 0])
    assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (6, 4)
    assert counts.acceptance_rate == 4 / 6
    assert counts.acceptance_per_position == [2 / 3, 1.0, 0.0]
    assert counts.mean_accepted_length == 1 + 4 / 3


def test_drafts_behind_a_rejected_one_were_not_asked_for() -> None:
    counts = DraftCounts()
    counts.add(4, 1)
    counts.add(4, 4)
    counts.add(2, 0)
    assert counts.num_reached == 2 + 4 + 1
    assert counts.acceptance_of_reached == 5 / 7


def test_speedup_is_of_the_summed_times() -> None:
    counts = DraftCounts()
    counts.add(4, 4, seconds=1.0, plain_seconds=3.0)
    counts.add(4, 0, seconds=1.0, plain_seconds=1.0)
    assert counts.speedup == pytest.approx(2.0)


def test_nothing_verified_has_no_rates() -> None:
    counts = DraftCounts()
    assert counts.acceptance_rate is counts.mean_accepted_length is counts.speedup is None
    assert counts.acceptance_of_reached is None
    assert counts.acceptance_per_position == []
    counts.add(1, 1)
    assert counts.speedup is None, "without a cost model"
