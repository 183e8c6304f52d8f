"""Every range check of SamplingParams names its field."""

import math

import pytest

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop", ("",)),
        ("stop", ("a",) * 17),
        ("stop", (3,)),
        ("stop_token_ids", ("3",)),
        ("stop_token_ids", (True,)),
        ("bad_words", ("",)),
        ("allowed_token_ids", ()),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("seed", 2**64),
        ("seed", "x"),
        ("temperature", 10**400),
        ("logit_bias", {3: 10**400}),
        ("logit_bias", {3: "1"}),
        ("logit_bias", {3: None}),
        ("logit_bias", [3]),
        ("logit_bias", None),
        ("stop_token_ids", range(257)),
        ("bad_words", ["a"] * 129),
        ("bad_words", ["a"] * 100_000),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop_token_ids", 0),
        ("stop_token_ids", "3"),
        ("bad_words", "word"),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", "5"),
        ("ignore_eos", None),
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", "no"),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("top_k", -1),
        ("top_k", 0),
        ("top_p", 1),
        ("min_p", 1.0),
        ("max_tokens", None),
        ("logprobs", 0),
        ("logprobs", 20),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("logit_bias", {3: -100.0}),
        ("stop", ("a",) * 16),
        ("stop_token_ids", tuple(range(256))),
        ("bad_words", ("a",) * 128),
        ("logit_bias", dict.fromkeys(range(1024), 1.0)),
    ],
)
def test_a_value_at_the_edge_is_accepted(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


def test_a_list_that_is_too_long_is_not_repeated_in_the_message() -> None:
    with pytest.raises(InvalidRequestError, match="bad_words has 100000 entries, at most 128"):
        SamplingParams(bad_words=["word"] * 100_000)


def test_one_stop_string_becomes_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_greedy_and_penalties() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(presence_penalty=0.1).has_penalties
    assert SamplingParams(frequency_penalty=0.1).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
