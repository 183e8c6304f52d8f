"""However many drafts a step accepts, the output is that of a token a step, to the last field."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mini_infer.core.events import Answered, Event
from tests.runtime.output_bench import EOS, Bench

IM_START = 258
"""A token of several characters: a stop string may begin and end within it."""
TOKENS = st.lists(
    st.sampled_from([*b"abc\n!", *"\xe9\U0001f600\ufffd".encode(), 0xFF, IM_START, EOS]),
    max_size=24,
)
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=6)
PARAMS = st.fixed_dictionaries(
    {
        "stop": st.lists(
            st.text(alphabet="ab\n\xe9", min_size=1, max_size=3)
            | st.sampled_from(["im_st", "start|>a", "\ufffd", "\U0001f600"]),
            max_size=2,
        ),
        "stop_token_ids": st.lists(st.sampled_from([*b"!c", IM_START]), max_size=1),
        "max_tokens": st.integers(8, 30),
        "min_tokens": st.integers(0, 8),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logprobs": st.none() | st.integers(0, 2),
        "stream": st.booleans(),
    }
)


def run(tokens: list[int], sizes: list[int], params: dict[str, Any]) -> tuple[Bench, list[Event]]:
    bench, answered = Bench(), list[Event]()
    bench.events.subscribe(answered.append, Answered)
    bench.add(**params)
    bench.requests["r"].eos_token_ids = frozenset({EOS})
    if not params.get("ignore_eos"):
        bench.requests["r"].end_token_ids |= {EOS}
    bench.sample(tokens, sizes)
    return bench, answered


CASES: list[tuple[list[int], dict[str, Any]]] = [
    (list(b" ABCDEFGHIJKL"), {"stop": ["DEFGHIJ"]}),  # 1: it spans tokens
    (list(b"?\n"), {"stop": ["\n"]}),  # 2: held-back text
    (list(b" Alice!"), {"stop": ["\n", "Alice:"]}),
    ([*b"is ", IM_START], {"stop": ["im_st"], "skip_special_tokens": False}),  # 3: inside a token
    ([*"\U0001f600".encode()[:3], *"\ufffd\xe9".encode(), 0xFF], {}),  # 4: broken UTF-8
    ([10, 11, ord("!"), 20, 21, 22], {"stop_token_ids": [ord("!")], "max_tokens": 5}),  # 9
    ([10, 11, 12, 13, 14, ord("!")], {"stop_token_ids": [ord("!")], "max_tokens": 5}),
    (list(b"ab.cd"), {"stop": ["."], "max_tokens": 3}),  # the last token completes it
    ([*b"ab.", EOS], {"stop": ["."]}),  # and a token that ends it comes right behind
]


@pytest.mark.parametrize(("tokens", "params"), CASES)
@pytest.mark.parametrize("size", range(2, 7))
def test_regression_09_known_faults_in_any_split(
    tokens: list[int], params: dict[str, Any], size: int
) -> None:
    params = {"logprobs": 1, **params}
    assert run(tokens, [size], params)[0].output == run(tokens, [1], params)[0].output


@given(TOKENS, SIZES, PARAMS)
@example(list(b"abc"), [3], {"stop": ["b"], "stop_token_ids": [ord("c")], "logprobs": 0})
def test_regression_09_any_split_gives_the_same_output(
    tokens: list[int], sizes: list[int], params: dict[str, Any]
) -> None:
    drafted, told = run(tokens, sizes, params)
    plain, told_plainly = run(tokens, [1], params)
    assert drafted.output == plain.output
    assert told == told_plainly
    assert drafted.deltas[-1].stop_reason == plain.deltas[-1].stop_reason
    choice = drafted.choice
    assert "".join(drafted.texts) == choice.text
    assert [token for delta in drafted.deltas for token in delta.token_ids] == choice.token_ids
    logprobs = [position for delta in drafted.deltas for position in delta.logprobs]
    assert logprobs == (choice.logprobs or [])
    drafted.assert_empty()


@given(TOKENS, SIZES, PARAMS)
def test_no_delta_runs_ahead_of_a_stop_string(
    tokens: list[int], sizes: list[int], params: dict[str, Any]
) -> None:
    """What a stream has shown after a step is what it shows by then with a token a step."""
    params = {**params, "stream": True}
    drafted, _ = run(tokens, sizes, params)
    plain, _ = run(tokens, [1], params)

    def shown_by(bench: Bench) -> dict[int, str]:
        """By the number of tokens that it was told with."""
        counts = accumulate(len(delta.token_ids) for delta in bench.deltas)
        texts = accumulate(bench.texts)
        return dict(zip(counts, texts, strict=True))

    expected = shown_by(plain)
    for count, text in shown_by(drafted).items():
        assert text == expected[count]
    for one, other in pairwise(shown_by(drafted).values()):
        assert other.startswith(one)
