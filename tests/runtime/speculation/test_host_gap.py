"""Drafts of a host that holds up its device: they cost what they really take, not what was told."""

import random
from collections.abc import Sequence

import pytest

from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from tests.runtime.speculation.timed_engine import TimedDevice, TimedEngine

ANSWERS = 6
NUM_TOKENS = 200
SHORT = 64
Answer = tuple[list[int], list[int]]
"""Prompt and answer."""


def make_costs(*verify: float) -> StepCosts:
    """In plain steps, by the number of drafts."""
    return StepCosts((1,), tuple(range(len(verify))), (verify,), ((0.0,) * len(verify),))


TINY = make_costs(1.0, 1.29, 1.70, 1.68, 3.13)
"""A step of SmolLM2-135M on an H200: a chain of short kernels."""
LARGE = make_costs(1.0, 1.05, 1.1, 1.15, 1.2)
"""One that reads its weights."""


def make_answers(
    acceptance: float, num_answers: int, num_tokens: int, seed: int = 0
) -> list[Answer]:
    """Answers that copy their prompts, but for tokens that come by chance in between: prompt lookup
    is right with so much likelihood, over and over."""
    die = random.Random(seed)
    answers = []
    for _ in range(num_answers):
        prompt = [die.randrange(10_000) for _ in range(400)]
        place, answer = 0, list[int]()
        while len(answer) < num_tokens:
            if die.random() < acceptance:
                answer.append(prompt[place % 400])
                place += 1
            else:
                answer.append(10_000 + die.randrange(10_000))
                place = die.randrange(300)
        answers.append((prompt, answer))
    return answers


def losses(
    costs: StepCosts, gap: float, answers: Sequence[Answer], told: StepCosts | None = None
) -> tuple[list[float], float]:
    """By how many plain steps each answer is later than by plain decoding, of all its steps 2 %
    aside; and the speed-up over all of them."""
    speculation = SpeculativeConfig(method="ngram")
    engines = [
        TimedEngine(TimedDevice(costs, told, gap / 2, gap / 2), config, max_num_seqs=1)
        for config in (None, speculation)
    ]
    took = [[engine.answer(answer) for engine in engines] for answer in answers]
    plain, drafted = (sum(column) for column in zip(*took, strict=True))
    return [after - 1.02 * before for before, after in took], plain / drafted


@pytest.mark.parametrize("costs", [TINY, LARGE])
@pytest.mark.parametrize("gap", [0.5, 1.0])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_tokens", [SHORT, NUM_TOKENS])
def test_no_answer_is_later_by_more_than_two_percent_and_a_few_steps(
    costs: StepCosts, gap: float, acceptance: float, num_tokens: int
) -> None:
    found, speedup = losses(costs, gap, make_answers(acceptance, ANSWERS, num_tokens))
    assert max(found) < 4
    assert speedup > 0.98


@pytest.mark.parametrize(("costs", "gap", "least"), [(TINY, 0.5, 1.2), (LARGE, 1.0, 1.4)])
def test_answers_that_copy_are_still_faster(costs: StepCosts, gap: float, least: float) -> None:
    _, speedup = losses(costs, gap, make_answers(0.98, 3 * ANSWERS, NUM_TOKENS))
    assert speedup > least


def test_where_the_host_takes_no_time_nothing_is_lost_of_what_drafts_bring() -> None:
    _, speedup = losses(LARGE, 0.01, make_answers(0.98, ANSWERS, NUM_TOKENS))
    assert speedup > 2.5


def test_steps_that_take_longer_than_was_measured_are_found_out() -> None:
    """All of them, by the same factor: a longer text than that of the start."""
    told = make_costs(*(0.5 * seconds for seconds in LARGE.verify[0]))
    _, speedup = losses(LARGE, 0.5, make_answers(0.98, ANSWERS, NUM_TOKENS), told)
    _, expected = losses(LARGE, 0.5, make_answers(0.98, ANSWERS, NUM_TOKENS))
    assert speedup > 0.9 * expected


def test_time_between_requests_is_no_steps() -> None:
    answers = make_answers(0.98, 2, NUM_TOKENS)
    device = TimedDevice(LARGE)
    engine = TimedEngine(device, SpeculativeConfig(method="ngram"), max_num_seqs=1)
    first = engine.answer(answers[0])
    device.now += 1000
    assert engine.answer(answers[1]) < 1.1 * first
