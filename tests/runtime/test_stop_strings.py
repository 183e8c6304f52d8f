"""Stop strings over pieces of text: nothing of them leaks, nothing else is lost or repeated."""

import itertools
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.runtime.stop_strings import StopStringMatcher


def run(
    stops: list[str], pieces: list[str], include: bool = False
) -> tuple[list[str], StopStringMatcher]:
    """The pieces that are shown (with the flushed rest last), and the matcher."""
    matcher = StopStringMatcher(stops, include)
    shown = [matcher.append(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher


def test_regression_01_stop_string_spans_tokens() -> None:
    shown, matcher = run(["DEFGHIJ"], ["D", "EF", "G", "HI", "JK", "LM"])
    assert "".join(shown) == ""
    assert matcher.matched == "DEFGHIJ"


def test_regression_02_text_before_a_newline_stop_is_delivered() -> None:
    shown, matcher = run(["\n"], ["?", "\n"])
    assert shown == ["?", "", ""]
    assert matcher.matched == "\n"


def test_regression_02_held_back_text_is_delivered_once() -> None:
    shown, matcher = run(["\n", "Alice:"], [" Alice", "!"])
    assert shown == [" ", "Alice!", ""]
    assert matcher.matched is None


def test_regression_02_held_back_text_is_flushed_at_the_end() -> None:
    shown, _ = run(["Alice:"], [" Ali"])
    assert shown == [" ", "Ali"]


def test_regression_03_stop_inside_a_token() -> None:
    shown, matcher = run(["Pari"], ["capital:", " Paris"])
    assert "".join(shown) == "capital: "
    assert matcher.matched == "Pari"


def test_without_stops_text_passes_through() -> None:
    shown, matcher = run([], ["a", "", "b"])
    assert shown == ["a", "", "b", ""]
    assert matcher.matched is None


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [(["xab", "cd"], ["xab", "c", ""]), (["xabcd"], ["xabc", ""]), (["xabcab"], ["xabc", ""])],
)
def test_included_stop_string_ends_the_text(pieces: list[str], shown: list[str]) -> None:
    assert run(["abc"], pieces, include=True)[0] == shown


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        (["b", "ab"], ["xab"], "xa", "b"),  # both end at once: the first of the list
        (["ab", "b"], ["xab"], "x", "ab"),
        (["abcd", "bc"], ["xabcd"], "xa", "bc"),  # the one that is complete first
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),  # a match that begins inside another
        (["abac"], ["ababac"], "ab", "abac"),
        (["é\U0001f600"], ["caf", "é", "\U0001f600!"], "caf", "é\U0001f600"),
    ],
)
def test_which_stop_string_wins(stops: list[str], pieces: list[str], text: str, stop: str) -> None:
    shown, matcher = run(stops, pieces)
    assert ("".join(shown), matcher.matched) == (text, stop)


def test_nothing_follows_a_stop() -> None:
    matcher = StopStringMatcher(["."])
    assert matcher.append("one. two. three") == "one"
    assert matcher.append(" four") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "."


def test_unarmed_text_completes_no_stop_string_but_may_begin_one() -> None:
    matcher = StopStringMatcher(["ab"])
    assert matcher.append("abxa", armed=False) == "abx"
    assert matcher.matched is None
    assert matcher.append("bc") == ""
    assert matcher.matched == "ab"


def test_a_stop_string_may_overlap_one_that_did_not_count() -> None:
    matcher = StopStringMatcher(["aa"])
    assert matcher.append("aa", armed=False) == "a"
    assert matcher.append("a") == ""
    assert matcher.matched == "aa"


def test_only_what_can_still_become_a_stop_string_is_held_back() -> None:
    matcher = StopStringMatcher(["<end>", "dog."])
    assert matcher.append("a <") == "a "
    assert matcher.append("en") == ""
    assert matcher.append("o do") == "<eno "
    assert matcher.append("or") == "door"


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=40),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    include=st.booleans(),
)
def test_pieces_do_not_matter(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """Against the definition: the earliest end of any stop string, by plain searching."""
    ends = [
        (text.find(stop) + len(stop), order) for order, stop in enumerate(stops) if stop in text
    ]
    expected, stop = text, None
    if ends:
        end, order = min(ends)
        stop = stops[order]
        expected = text[:end] if include else text[: end - len(stop)]
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    shown, matcher = run(stops, pieces, include)
    assert "".join(shown) == expected
    assert matcher.matched == stop


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_held_back_is_the_longest_suffix_that_begins_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    seen = shown = ""
    for char in text:
        seen += char
        shown += matcher.append(char)
        if matcher.matched is not None:
            return
        suffixes = [seen[cut:] for cut in range(len(seen) + 1)]
        held = next(part for part in suffixes if any(stop.startswith(part) for stop in stops))
        assert seen == shown + held


def num_lines(action: Callable[[], object]) -> int:
    """Lines that ``action`` executes, which unlike time do not depend on the machine."""
    count = 0

    def trace(*_: object) -> object:
        nonlocal count
        count += 1
        return trace

    previous = sys.gettrace()  # of a coverage tool or a debugger
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        action()
    finally:
        sys.settrace(previous)
    return count


def test_work_is_linear_with_a_long_hold_back() -> None:
    def hold_back(num_chars: int) -> None:
        matcher = StopStringMatcher(["a" * num_chars + "b"])
        for _ in range(2 * num_chars):
            matcher.append("a")

    assert num_lines(lambda: hold_back(800)) < 9 * num_lines(lambda: hold_back(100))


def test_a_huge_stop_string_costs_only_what_the_text_matches_of_it() -> None:
    shown = []

    def match() -> None:
        shown.append(StopStringMatcher(["ab" * 500_000] * 16).append("abac"))

    assert num_lines(match) < 5000
    assert shown == ["abac"]
