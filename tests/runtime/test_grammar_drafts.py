"""Masks along drafts are those of a grammar that accepts them one by one, which then goes back."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.runtime.grammar import Grammar, fill_masks
from tests.runtime.test_grammar import BYTES, EOS, OTHER_EOS, TEXTS, TINY, VOCAB, allowed, begin

ROW_BYTES = (VOCAB + 31) // 32 * 4


def rows_of(masks: bytearray) -> list[set[int]]:
    """The tokens that each row allows."""
    rows = [masks[start : start + ROW_BYTES] for start in range(0, len(masks), ROW_BYTES)]
    return [{token for token in range(VOCAB) if row[token >> 3] >> (token & 7) & 1} for row in rows]


def check_rows(make: Any, history: list[int], drafts: tuple[int, ...]) -> None:
    """Rows count up to the first draft that its mask does not allow, or that ends the output."""
    grammar: Grammar = make()
    for token_id in history:
        assert grammar.accept(token_id) is None
    before = allowed(grammar, VOCAB)
    rows = rows_of(fill_masks([grammar], VOCAB, [drafts]))
    assert len(rows) == 1 + len(drafts)
    assert rows[0] == before == allowed(grammar, VOCAB)
    for token_id, row, behind in zip(drafts, rows, rows[1:], strict=False):
        if token_id not in row or grammar.complete:
            return
        assert grammar.accept(token_id) is None
        if not grammar.complete:
            assert behind == allowed(grammar, VOCAB)


@settings(max_examples=60, deadline=None)
@given(
    language=st.lists(TEXTS, min_size=1, max_size=4, unique=True),
    ignore_eos=st.booleans(),
    num_known=st.integers(0, 3),
    num_drafts=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_each_row_is_that_of_the_grammar_behind_its_draft(
    language: list[str], ignore_eos: bool, num_known: int, num_drafts: int, seed: int
) -> None:
    def make() -> Grammar:
        return begin(TINY, ignore_eos, choice=language)

    die, walk, path = random.Random(seed), make(), list[int]()
    while len(path) < num_known + num_drafts and not walk.complete:
        path.append(die.choice(sorted(allowed(walk, VOCAB))))
        assert walk.accept(path[-1]) is None
    path += [die.randrange(VOCAB) for _ in range(num_known + num_drafts - len(path))]
    if die.random() < 0.5:
        path[die.randrange(num_known, len(path))] = die.choice([EOS, OTHER_EOS, *range(VOCAB)])
    known = make()
    history = []
    for token_id in path[:num_known]:
        if known.complete or token_id not in allowed(known, VOCAB):
            break
        assert known.accept(token_id) is None
        history.append(token_id)
    if not known.complete:
        check_rows(make, history, tuple(path[len(history) :]))


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("end", [EOS, OTHER_EOS])
def test_a_draft_that_ends_the_text_is_taken_back(end: int, ignore_eos: bool) -> None:
    grammar = begin(TINY, ignore_eos, regex="[ab]+")
    first = min(allowed(grammar, VOCAB) - {EOS, OTHER_EOS})
    before = allowed(grammar, VOCAB)
    rows = rows_of(fill_masks([grammar], VOCAB, [(first, end, first)]))
    assert allowed(grammar, VOCAB) == before == rows[0]
    assert not grammar.complete
    assert grammar.accept(first) is None
    assert rows[1] == allowed(grammar, VOCAB)
    assert (end in rows[1]) == (not ignore_eos)


def test_many_drafts_of_a_nested_form_are_taken_back() -> None:
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "number"}}}}
    text = b'[{"a": 12.5e3}, {"a": -1}]'
    for known in range(len(text)):
        grammar = begin(BYTES, json=schema)
        for token_id in text[:known]:
            assert grammar.accept(token_id) is None
        drafts = tuple(text[known : known + 16])
        fill_masks([grammar], 260, [drafts])
        for token_id in text[known:]:
            assert grammar.accept(token_id) is None
