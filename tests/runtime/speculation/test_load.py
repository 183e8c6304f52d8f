"""Users' proposers, also careless ones."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mini_infer.core.errors import InvalidConfigError, ProposerError
from mini_infer.core.request import Request
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.runtime.speculation.load import load_proposer, load_proposer_class
from mini_infer.runtime.speculation.ngram import NGramProposer
from tests.runtime.speculation.simulation import make_request


class Scripted:
    """Answers what the test says."""

    answer: Any = None

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config

    def propose(self, requests: Sequence[Request], num_drafts: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class OnDevice(Scripted):
    on_device = True


class Appends(Scripted):
    """Drafts one token after the other, where it should copy first."""

    def propose(self, requests: Sequence[Request], num_drafts: int) -> Any:
        for request in requests:
            request.token_ids.extend(range(num_drafts))
        return super().propose(requests, num_drafts)


class TakesAway(Scripted):
    """Cuts off the end of what it reads, and of one request all."""

    def propose(self, requests: Sequence[Request], num_drafts: int) -> Any:
        del requests[0].token_ids[-1]
        requests[1].token_ids.clear()
        return super().propose(requests, num_drafts)


class Unbuildable(Scripted):
    def __init__(self) -> None:
        pass


class Mute:
    pass


def a_function() -> None:
    pass


def load(name: str, vocab_size: int = 100) -> Any:
    return load_proposer(SpeculativeConfig(method=f"{__name__}:{name}"), vocab_size)


def test_ngram_is_built_in() -> None:
    assert isinstance(load_proposer(SpeculativeConfig(method="ngram"), 100), NGramProposer)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("nonsense", "no method 'nonsense': use ngram, draft_model"),
        (":Class", "your own as module:Class"),
        ("no_such_module:Class", "can't be loaded: No module named 'no_such_module'"),
        (f"{__name__}:NoSuchClass", "can't be loaded"),
        (f"{__name__}:Mute", "lacks propose()"),
        (f"{__name__}:a_function", "is not a class"),
        (f"{__name__}:Unbuildable", "is given one argument, the SpeculativeConfig"),
    ],
)
def test_a_class_that_cannot_be_used_is_an_error_of_the_configuration(
    method: str, message: str
) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        load_proposer(SpeculativeConfig(method=method), 100)
    assert message in str(raised.value)


def test_a_class_says_where_it_runs() -> None:
    assert load_proposer_class(f"{__name__}:OnDevice").on_device  # type: ignore[attr-defined]
    assert load_proposer_class(f"{__name__}:Scripted") is Scripted


def endless() -> Iterator[int]:
    return itertools.count()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([[1, 2], []], [(1, 2), ()]),
        (([1, 2, 3, 4, 5, 6], (99,)), [(1, 2, 3), (99,)]),  # no more than it was asked for
        ([endless(), range(2)], [(0, 1, 2), (0, 1)]),
        (iter([[1], [2]]), [(1,), (2,)]),
        ([[1, 2, 3, -1], []], [(1, 2, 3), ()]),  # what is cut is not looked at
    ],
)
def test_what_is_as_good_as_a_list_of_lists_of_tokens(
    answer: Any, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "answer", answer)
    assert load("Scripted").propose([make_request([1]), make_request([2])], 3) == expected


def test_tensors_and_arrays_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy
    import torch

    for rows in (torch.tensor([[1, 2], [3, 4]]), numpy.array([[1, 2], [3, 4]])):
        monkeypatch.setattr(Scripted, "answer", rows)
        drafts = load("Scripted").propose([make_request([1]), make_request([2])], 3)
        assert drafts == [(1, 2), (3, 4)]
        assert all(type(token_id) is int for row in drafts for token_id in row)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "TypeError"),
        ([], "it must return drafts for each request, 2 here, and returned 0"),
        ([[1], [2], [3]], "2 here, and returned more"),
        (itertools.repeat([1]), "2 here, and returned more"),
        ([[1], None], "TypeError"),
        ([[1], 2], "TypeError"),
        ([[1], ["a"]], "TypeError"),
        ([[1], [1.5]], "TypeError"),
        ([[1], [[1]]], "TypeError"),
        ("ab", "TypeError"),
        ([[1], [100]], "[100] are not all tokens: ids go from 0 to 99"),
        ([[-1], []], "[-1] are not all tokens"),
        ([[1], [2**70]], "are not all tokens"),
        (KeyError("a bug"), "KeyError: 'a bug'"),
        (SystemError("worse"), "SystemError: worse"),
    ],
)
def test_a_mistake_becomes_an_error_that_names_its_author(
    answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "answer", answer)
    with pytest.raises(ProposerError) as raised:
        load("Scripted").propose([make_request([1]), make_request([2])], 3)
    assert message in str(raised.value)
    assert f"{__name__}:Scripted, method propose(): " in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "message"), [([[1], [2]], "copy them first"), (KeyError("a bug"), "KeyError")]
)
@pytest.mark.parametrize("name", ["Appends", "TakesAway"])
def test_as_many_tokens_stay_a_requests_as_it_had(
    name: str, answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for ever for steps of those that were added, or taken away."""
    monkeypatch.setattr(Scripted, "answer", answer)
    proposer, requests = load(name), [make_request([1]), make_request([2, 3])]
    for _ in range(2):
        for request in requests:
            request.token_ids.append(7)  # the engine's own
        before = [list(request.token_ids) for request in requests]
        with pytest.raises(ProposerError, match=message):
            proposer.propose(requests, 3)
        assert [request.token_ids for request in requests] == before
