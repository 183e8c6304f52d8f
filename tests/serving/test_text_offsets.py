"""Offsets index into the text that is returned, whatever the tokens hide, split or change."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.detokenizer import IncrementalDetokenizer, TokenTexts
from mini_infer.serving.text_offsets import PromptText, TextPosition

BOS, IM_START = 256, 258


class Sentencepiece(ByteTokenizer):
    """Puts a first token and a space before each text, and takes the space away again."""

    strips_leading_space = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS, ord(" "), *super().encode(text)]


class Lowercase(ByteTokenizer):
    """Changes the text, so that its tokens spell another one: longer than what came."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.replace("\xdf", "sss"))


def prompt_text(
    prompt: str | Sequence[int], skip: bool = True, tokenizer: ByteTokenizer | None = None
) -> PromptText:
    return PromptText(tokenizer or ByteTokenizer(), prompt, skip)


@pytest.mark.parametrize(
    ("parts", "offsets"),
    [
        ((b"a", b"bc", b"d"), [0, 1, 3]),
        # The third token ends the first character and begins the second one.
        ((b"x", b"\xe6\x97", b"\xa5\xe6", b"\x9c\xac", b"y"), [0, 1, 1, 2, 3]),
        ((b"a", b"", b"b"), [0, 1, 1]),
        ((b"\xe6", b"a"), [0, 1]),  # what was begun becomes U+FFFD
        ((b"\xe6", b"\xe6", b"\x97", b"\xa5"), [0, 1, 1, 1]),
        ((b"\xff", b"\x97", b"a"), [0, 1, 2]),
        (("\U0001f600".encode()[:3], b"", "\U0001f600".encode()[3:], b"a"), [0, 0, 0, 1]),
    ],
    ids=repr,
)
def test_positions_of_bytes(parts: Sequence[bytes], offsets: list[int]) -> None:
    position = TextPosition(0, strip_space=False)
    assert [position.advance(part) for part in parts] == offsets


@given(
    token_ids=st.lists(st.sampled_from([*b"a \xc3\xa9\xf0\x9f\x98\x80\xff", BOS, IM_START])),
    skip=st.booleans(),
    prompt=st.sampled_from([[BOS], [72]]),
    strips=st.booleans(),
)
def test_offsets_are_those_of_the_detokenizer(
    token_ids: list[int], skip: bool, prompt: list[int], strips: bool
) -> None:
    """A token's character is the last one of the text up to its first byte."""
    tokenizer = Sentencepiece() if strips else ByteTokenizer()
    text = prompt_text(prompt, skip, tokenizer)
    position = text.end(echo=False)
    for index, token_id in enumerate(token_ids):
        detokenizer = IncrementalDetokenizer(TokenTexts(tokenizer, skip), prompt)
        before = detokenizer.append(token_ids[:index])
        offset = position.advance(text.shown_bytes(token_id))
        if token_id >= 256:
            # It shows after the U+FFFD that it makes of a character that was begun, or not at all.
            assert offset == len(before if skip else before + detokenizer.flush())
        else:
            upto = before + detokenizer.append([token_id]) + detokenizer.flush()
            assert offset == max(0, len(upto) - 1)


@given(
    prompt=st.lists(st.sampled_from([*b"a \xc3\xa9\xff", BOS, IM_START]), min_size=1),
    skip=st.booleans(),
    strips=st.booleans(),
)
def test_offsets_of_an_echo_rise_and_stay_in_its_text(
    prompt: list[int], skip: bool, strips: bool
) -> None:
    text = prompt_text(prompt, skip, Sentencepiece() if strips else ByteTokenizer())
    assert len(text.offsets) == len(prompt)
    assert text.offsets == sorted(text.offsets)
    assert text.offsets[-1] <= len(text.text)
    for token_id, offset in zip(prompt, text.offsets, strict=True):
        if token_id == ord("a"):
            assert text.text[offset] == "a"


@pytest.mark.parametrize(
    ("prompt", "skip", "text", "offsets"),
    [
        ([72, BOS, 105, 105], True, "Hii", [0, 1, 1, 2]),
        ([72, BOS, 105, 105], False, "H<|bos|>ii", [0, 1, 8, 9]),
        ([BOS, 72], True, "H", [0, 0]),
        ([BOS], True, "", [0]),
        ("H<|bos|>i", True, "H<|bos|>i", [0, 1, 8]),  # it came as text, so it shows
        ("\xfcb", True, "\xfcb", [0, 0, 1]),
    ],
    ids=repr,
)
def test_an_echoed_prompt(
    prompt: str | list[int], skip: bool, text: str, offsets: list[int]
) -> None:
    echoed = prompt_text(prompt, skip)
    assert (echoed.text, echoed.offsets) == (text, offsets)


def test_a_first_token_that_the_tokenizer_added_has_no_length() -> None:
    echoed = prompt_text("ab<|im_end|>c", tokenizer=Sentencepiece())
    assert echoed.first_token == "<|bos|>"
    # <|bos|>, the space that is taken away, a, b, <|im_end|>, c
    assert echoed.offsets == [0, 0, 0, 1, 2, 12]


def test_a_text_that_the_tokenizer_makes_longer() -> None:
    echoed = prompt_text("a\xdf", tokenizer=Lowercase())
    assert echoed.offsets == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("prompt", "offsets"), [([BOS], [0, 0]), ([BOS, 72], [0, 1]), ("Hi", [0, 1])], ids=repr
)
def test_an_answer_that_begins_the_text_loses_its_space(
    prompt: str | list[int], offsets: list[int]
) -> None:
    position = prompt_text(prompt, tokenizer=Sentencepiece()).end(echo=False)
    assert [position.advance(b" "), position.advance(b"a")] == offsets


def test_an_answer_after_an_echo_begins_at_its_end() -> None:
    assert prompt_text([72, BOS]).end(echo=True).advance(b"a") == 1
