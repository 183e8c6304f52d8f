"""Drafts of the host on an engine that only counts: when they are on, and what is verified."""

import logging
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.errors import ProposerError
from mini_infer.core.request import Request
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS, SpeculativeConfig
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.host_drafts import HostDrafts
from mini_infer.runtime.speculation.ngram import NGramProposer
from tests.runtime.speculation.simulation import HostRun, make_costs, make_request

CONFIG = SpeculativeConfig(method="ngram")


class Oracle:
    """Knows each request's answer; for some of its tokens it has no draft, or a wrong one."""

    def __init__(self, offered: float = 1.0, right: float = 1.0) -> None:
        self.offered, self.right = offered, right
        self.answers: dict[str, Sequence[int]] = {}
        self.num_calls = self.num_asked = 0
        self._die = random.Random(0)

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        self.num_calls += 1
        self.num_asked += len(requests)
        return [self._draft(request, num_drafts) for request in requests]

    def _draft(self, request: Request, num_drafts: int) -> list[int]:
        if self._die.random() >= self.offered:
            return []
        start = request.num_output_tokens
        rest = self.answers[request.request_id][start : start + num_drafts]
        return [token + (self._die.random() >= self.right) for token in rest]


class GoodForOdd(Oracle):
    """Right for every second request, and always wrong for the others."""

    def _draft(self, request: Request, num_drafts: int) -> list[int]:
        self.right = int(request.request_id) % 2
        return super()._draft(request, num_drafts)


def run_oracle(
    oracle: Oracle,
    num_rows: int = 1,
    num_tokens: int = 300,
    verify: float = 0.05,
    config: SpeculativeConfig = CONFIG,
) -> HostRun:
    run = HostRun(oracle, config, make_costs(verify))
    requests = [make_request([1], num_tokens, str(row)) for row in range(num_rows)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    oracle.answers = {
        request.request_id: [random.Random(row).randrange(100) for _ in range(num_tokens)]
        for row, request in enumerate(requests)
    }
    run.answer(requests, [oracle.answers[request.request_id] for request in requests])
    return run


def test_good_drafts_are_on_soon_and_reach_nearly_what_they_can() -> None:
    run = run_oracle(Oracle())
    assert run.speedup > 0.9 * 5 / 1.4
    assert run.num_steps - run.num_steps_with_drafts < 20


def test_bad_drafts_cost_nothing() -> None:
    for oracle in (Oracle(right=0.0), Oracle(offered=0.0), Oracle(offered=0.1, right=0.3)):
        run = run_oracle(oracle)
        assert run.num_drafts == run.num_steps_with_drafts == 0
        assert run.speedup == pytest.approx(1.0)


def test_a_batch_that_mostly_has_no_drafts_stays_plain() -> None:
    class OnlyFirst(Oracle):
        def _draft(self, request: Request, num_drafts: int) -> list[int]:
            return super()._draft(request, num_drafts) if request.request_id == "0" else []

    assert run_oracle(OnlyFirst(), num_rows=1).speedup > 2
    assert run_oracle(OnlyFirst(), num_rows=2).num_steps_with_drafts > 20
    assert run_oracle(OnlyFirst(), num_rows=32).num_steps_with_drafts == 0


def test_only_drafts_of_requests_for_which_they_are_right_are_verified() -> None:
    run = run_oracle(GoodForOdd(), num_rows=8)
    assert run.speedup > 1.2  # the good ones end early
    requests = [make_request([1], 99, str(row)) for row in range(2)]
    oracle = GoodForOdd()
    oracle.answers = {str(row): [5] * 99 for row in range(2)}
    ours = HostRun(oracle, CONFIG, make_costs(verify=0.25))
    lengths = []
    for _ in range(12):
        proposals = ours.drafts.propose(requests, [8, 8])
        lengths.append([len(drafts) for drafts in proposals])
        for request, drafts in zip(requests, proposals, strict=True):
            accepted = len(drafts) * int(request.request_id)
            place = len(request.token_ids)
            request.token_ids += [5] * (accepted + 1)
            if drafts:
                ours.drafts.verified(request, place, accepted)
        ours.drafts.watch(requests)
    assert lengths[-1][0] == 0
    assert lengths[-1][1] >= 3


def test_a_request_whose_drafts_were_cut_has_them_again_once_they_are_right() -> None:
    oracle, request = GoodForOdd(), make_request([1], 200, "0")
    oracle.answers = {"0": [5] * 200, "1": [5] * 200}
    run = HostRun(oracle, CONFIG, make_costs(verify=0.3))
    run.drafts._on = True
    lengths = []
    for step in range(60):
        if step == 30:
            request.request_id = "1"
        (drafts,) = run.drafts.propose([request], [8])
        lengths.append(len(drafts))
        accepted = len(drafts) * int(request.request_id)
        place = len(request.token_ids)
        request.token_ids += [5] * (accepted + 1)
        if drafts:
            run.drafts.verified(request, place, accepted)
        run.drafts.watch([request])
    assert lengths[29] == 0
    assert lengths[-1] == 4


def test_room_is_kept_to() -> None:
    for adaptive in (False, True):
        config = SpeculativeConfig(method="ngram", adaptive=adaptive)
        oracle = Oracle()
        oracle.answers = {"a": [1] * 100, "b": [1] * 100, "c": [1] * 100}
        costs = make_costs(verify=0.0)
        drafts = HostDrafts(config, oracle, DraftController(config, costs))
        requests = [make_request([1], name=name) for name in "abc"]
        assert list(map(len, drafts.propose(requests, [0, 2, 9]))) == [0, 2, 4]
        assert drafts.propose(requests, [-1, 0, -5]) == [(), (), ()]


def test_what_is_not_adaptive_is_always_on_up_to_the_most_rows() -> None:
    config = SpeculativeConfig(method="ngram", adaptive=False)
    run = run_oracle(Oracle(right=0.0), config=config)
    assert run.num_steps_with_drafts == run.num_steps
    assert run.num_drafts > 2 * run.num_steps
    assert run.drafts.drafting(MAX_SPECULATING_ROWS)
    assert not run.drafts.drafting(MAX_SPECULATING_ROWS + 1)
    assert not run.drafts.drafting(0)


def test_drafts_go_off_when_the_batch_grows_and_on_again_when_it_shrinks() -> None:
    run = run_oracle(Oracle(), verify=0.2)
    assert run.drafts.drafting(1)
    assert not run.drafts.drafting(64)
    assert run.drafts.drafting(1)


def test_the_shadow_asks_rarely_where_it_is_in_vain_and_few_of_many() -> None:
    in_vain = Oracle(right=0.0)
    run_oracle(in_vain, num_tokens=2000)
    assert in_vain.num_asked < 400
    many = Oracle(right=0.5)
    run_oracle(many, num_rows=64, num_tokens=100, verify=1.0)
    assert many.num_asked < 100 * 12
    too_many = Oracle()
    run_oracle(too_many, num_rows=MAX_SPECULATING_ROWS + 1, num_tokens=50)
    assert too_many.num_asked == 0


def test_a_proposer_that_fails_is_reported_once_and_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Oracle):
        def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
            if self.num_calls == 20:
                self.num_calls += 1
                raise ProposerError("speculative proposer x:Y, method propose(): it broke")
            assert self.num_calls < 20
            return super().propose(requests, num_drafts)

    for adaptive in (True, False):
        caplog.clear()
        config = SpeculativeConfig(method="x:Y", adaptive=adaptive)
        run = run_oracle(Failing(), config=config)
        assert run.num_steps_with_drafts < 25
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert "x:Y, method propose(): it broke; the engine goes on without it" in record.message


def test_copies_of_the_prompt_are_found_in_the_shadow() -> None:
    die = random.Random(0)
    document = [die.randrange(1000) for _ in range(400)]
    run = HostRun(NGramProposer(CONFIG), CONFIG, make_costs())
    run.answer([make_request(document, 200)], [document[100:300]])
    assert run.speedup > 2.5
    new = HostRun(NGramProposer(CONFIG), CONFIG, make_costs())
    new.answer([make_request(document, 200)], [[die.randrange(1000) for _ in range(200)]])
    assert new.speedup == pytest.approx(1.0)


def test_a_preemption_changes_nothing() -> None:
    """``token_ids`` stay, and tokens go on behind them."""
    oracle = Oracle()
    oracle.answers = {"r": [5] * 100}
    run = HostRun(oracle, CONFIG, make_costs())
    request = make_request([1], 100)
    run.answer([request], [[5] * 40])
    request.num_computed_tokens = 0
    request.num_preemptions = 1
    run.answer([request], [[5] * 80])
    assert run.speedup > 2


def test_nothing_is_kept_of_requests_that_are_gone() -> None:
    run = run_oracle(Oracle(), num_rows=3)
    assert len(run.drafts._rows) == 0


@settings(max_examples=25, deadline=None)
@given(
    phases=st.lists(
        st.tuples(st.integers(1, 150), st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
        min_size=1,
        max_size=5,
    ),
    num_rows=st.sampled_from([1, 2, 9]),
    verify=st.floats(0.0, 0.5),
)
def test_it_is_never_slower_than_plain_decoding_by_more_than_two_percent(
    phases: list[tuple[int, float, float]], num_rows: int, verify: float
) -> None:
    class Moody(Oracle):
        def _draft(self, request: Request, num_drafts: int) -> list[int]:
            place = request.num_output_tokens % sum(length for length, _, _ in phases)
            for length, offered, right in phases:
                if place < length:
                    self.offered, self.right = offered, right
                    break
                place -= length
            return super()._draft(request, num_drafts)

    run = run_oracle(Moody(), num_rows, 900 // num_rows, verify)
    assert run.speedup > 0.98


def test_the_same_happens_again_and_again() -> None:
    def once() -> tuple[float, int]:
        run = run_oracle(Oracle(offered=0.6, right=0.7), num_rows=3)
        return run.seconds, run.num_steps_with_drafts

    assert once() == once()
