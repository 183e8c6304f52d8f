"""Incremental text equals the whole decode, whatever the bytes and wherever tokens end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.detokenizer import IncrementalDetokenizer, TokenTexts

TOKENIZER = ByteTokenizer()
ROCKET = list("\U0001f680".encode())
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size + 1), max_size=40)


class MetaspaceTokenizer(ByteTokenizer):
    """A byte tokenizer whose texts lose one leading space, as sentencepiece's do."""

    strips_leading_space = True


def pieces(ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    """Text of each token, and of the flush."""
    detokenizer = IncrementalDetokenizer(TokenTexts(TOKENIZER, skip), prompt or [])
    return [*(detokenizer.append([token_id]) for token_id in ids), detokenizer.flush()]


@settings(deadline=None)
@given(ids=IDS, prompt=IDS, skip=st.booleans(), chunk=st.integers(1, 5))
def test_joined_pieces_equal_the_decode(
    ids: list[int], prompt: list[int], skip: bool, chunk: int
) -> None:
    detokenizer = IncrementalDetokenizer(TokenTexts(TOKENIZER, skip), prompt)
    text = ""
    for start in range(0, len(ids), chunk):
        text += detokenizer.append(ids[start : start + chunk])
    assert text + detokenizer.flush() == TOKENIZER.decode(ids, skip)


def test_regression_04_a_character_waits_for_its_last_byte() -> None:
    assert pieces([*ROCKET, 0x61]) == ["", "", "", "\U0001f680", "a", ""]


def test_regression_04_a_prompt_that_ends_inside_a_character_leaks_nothing() -> None:
    prompt = [*b"secret ", *ROCKET[:2]]
    shown = pieces([*ROCKET[2:], *b" ok"], prompt)
    assert "".join(shown) == TOKENIZER.decode([*ROCKET[2:], *b" ok"]) == "\ufffd\ufffd ok"
    assert shown[0] == "\ufffd"


def test_regression_04_a_genuine_replacement_character_does_not_stall() -> None:
    assert pieces(list("\ufffda\ufffd".encode())) == ["", "", "\ufffd", "a", "", "", "\ufffd", ""]


def test_regression_04_each_token_is_decoded_once() -> None:
    """The cost of a token does not grow with the text, however long nothing but U+FFFD comes."""

    class Counting(ByteTokenizer):
        num_calls = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.num_calls += 1
            return super().token_bytes(token_id)

    tokenizer = Counting()
    texts = TokenTexts(tokenizer, skip_special_tokens=True)
    for _ in range(2):  # two choices
        detokenizer = IncrementalDetokenizer(texts)
        text = "".join(
            detokenizer.append([token_id]) for token_id in [0xFF, *b"\xef\xbf\xbd"] * 500
        )
        assert text == "\ufffd" * 1000
    assert tokenizer.num_calls == 4


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (ROCKET[:1], "\ufffd"),
        (ROCKET[:3], "\ufffd"),
        ([0xE2, 0x28], "\ufffd("),
        ([0xED, 0xA0, 0x80], "\ufffd" * 3),  # a surrogate, which UTF-8 forbids
        ([0xC0, 0x80], "\ufffd" * 2),  # overlong
    ],
)
def test_an_incomplete_or_invalid_tail_becomes_replacement_characters(
    tail: list[int], text: str
) -> None:
    assert "".join(pieces([0x61, *tail])) == "a" + text == TOKENIZER.decode([0x61, *tail])


def test_nothing_is_flushed_after_a_whole_character() -> None:
    assert pieces(ROCKET)[-1] == ""


def test_special_tokens_do_not_break_a_character_when_skipped() -> None:
    ids = [*ROCKET[:2], TOKENIZER.bos_token_id, *ROCKET[2:]]
    assert "".join(pieces(ids)) == "\U0001f680"
    assert "".join(pieces(ids, skip=False)) == "\ufffd<|bos|>\ufffd\ufffd"


@pytest.mark.parametrize(
    ("prompt", "skip", "text"),
    [
        ([], True, " hi"),
        ([TOKENIZER.bos_token_id], True, " hi"),  # nothing stands before the output
        ([TOKENIZER.bos_token_id], False, "  hi"),
        (list(b"say"), True, "  hi"),
        ([0xFF], True, "  hi"),
    ],
)
def test_leading_space_is_stripped_only_at_the_start_of_a_text(
    prompt: list[int], skip: bool, text: str
) -> None:
    detokenizer = IncrementalDetokenizer(TokenTexts(MetaspaceTokenizer(), skip), prompt)
    ids = [TOKENIZER.bos_token_id, *b"  hi"] if skip else list(b"  hi")
    shown = [detokenizer.append([token_id]) for token_id in ids]
    assert "".join(shown) == text
    if not prompt:
        assert text == MetaspaceTokenizer().decode(ids, skip)


@settings(deadline=None)
@given(text=st.text(alphabet=" ab\xe9", max_size=12), cut=st.integers(0, 12))
def test_prompt_and_output_make_one_text(text: str, cut: int) -> None:
    tokenizer = MetaspaceTokenizer()
    prompt, output = text[:cut], text[cut:]
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    output_ids = tokenizer.encode(output, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(TokenTexts(tokenizer, True), prompt_ids)
    continued = "".join(detokenizer.append([token_id]) for token_id in output_ids)
    assert tokenizer.decode(prompt_ids) + continued == tokenizer.decode(prompt_ids + output_ids)
