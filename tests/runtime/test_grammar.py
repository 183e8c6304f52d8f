"""Grammars over small vocabularies: their masks against brute force, and what is no grammar."""

import itertools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from mini_infer.runtime import grammar_compiler
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.grammar import Grammar, fill_masks
from mini_infer.runtime.grammar_compiler import GrammarCompiler
from mini_infer.runtime.tokenizer import Tokenizer
from tests.runtime.fake_executor import TINY_MODEL, make_config

Params = StructuredOutputsParams
TOKENS = (
    *(b"a", b"b", b"c", b"ab", b"ba", b"abc", b"bb", b"\xc3", b"\xa9", b"x", b"", b"a", b"cab"),
    *(b"<think>", b"<eos>", b"<end>"),
)
"""Two are spelled alike, one is empty, two halve a character; the last three are special."""
SPECIAL = range(len(TOKENS) - 3, len(TOKENS))
EOS, OTHER_EOS = len(TOKENS) - 2, len(TOKENS) - 1
VOCAB = len(TOKENS) + 5
"""The logits have columns that no token has."""


class TinyTokenizer:
    """``TOKENS``, as far as a grammar asks."""

    vocab_size = len(TOKENS)
    eos_token_id = EOS

    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id] if token_id < len(TOKENS) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [TOKENS.index(bytes((byte,))) for byte in text.encode()]


def compiler(tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> GrammarCompiler:
    model = replace(TINY_MODEL, vocab_size=vocab_size, eos_token_ids=tuple(eos))
    typed: Tokenizer = tokenizer
    return GrammarCompiler(make_config(model_config=model), typed)


TINY = compiler(TinyTokenizer(), VOCAB, [EOS, OTHER_EOS])
BYTES = compiler(ByteTokenizer(), ByteTokenizer.vocab_size, [257])


def begin(grammars: GrammarCompiler, ignore_eos: bool = False, **form: Any) -> Grammar:
    params = Params(**form)
    grammars.check(params)
    return grammars.grammar(grammars.start(params).result(), ignore_eos)


def allowed(grammar: Grammar, vocab_size: int) -> set[int]:
    masks = fill_masks([grammar], vocab_size)
    return {
        token_id for token_id in range(vocab_size) if masks[token_id >> 3] >> (token_id & 7) & 1
    }


def viable(language: Sequence[bytes], prefix: bytes) -> set[int]:
    """By brute force: tokens after which some text of the language can still be reached."""
    ends = {EOS, OTHER_EOS} if prefix in language else set()
    return ends | {
        token_id
        for token_id, token in enumerate(TOKENS)
        if token
        and token_id not in SPECIAL
        and any(text.startswith(prefix + token) for text in language)
    }


def follow(grammar: Grammar, language: Sequence[str], choose: Any) -> None:
    """Walks through a language; at each place the mask is what brute force finds.

    Where all texts that can still be reached go on alike, only some of the tokens which spell that
    are allowed: those that the tokenizer spells it with.
    """
    texts, prefix = [text.encode() for text in language], b""
    while not grammar.complete and len(prefix) < 10:
        expected, found = viable(texts, prefix), allowed(grammar, VOCAB)
        next_bytes = {text[len(prefix) :][:1] for text in texts if text.startswith(prefix)}
        if len(next_bytes) == 1:
            assert found
            assert found <= expected
        else:
            assert found == expected
        token_id = choose(sorted(found))
        assert grammar.accept(token_id) is None
        if token_id in (EOS, OTHER_EOS):
            assert grammar.complete
            return
        prefix += TOKENS[token_id]
    assert not grammar.complete or viable(texts, prefix) == {EOS, OTHER_EOS}


TEXTS = st.text("abcé", min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(TEXTS, min_size=1, max_size=5))
def test_the_mask_of_a_choice_is_that_of_brute_force(data: Any, language: list[str]) -> None:
    follow(begin(TINY, choice=language), language, lambda ids: data.draw(st.sampled_from(ids)))


PARTS = ["".join(p) for n in range(4) for p in itertools.product(["ab", "c"], repeat=n)]
PAIRS = ["".join(pair) for pair in itertools.product(["ab", "ba"], repeat=2)]
PALINDROMES = ["b" * n + "a" + "b" * n for n in range(12)]
LANGUAGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"regex": "(ab|c){0,3}"}, PARTS),
    ({"regex": "a{2,4}b?"}, ["a" * n + end for n in (2, 3, 4) for end in ("", "b")]),
    ({"regex": "é|[ab]é"}, ["é", "aé", "bé"]),
    ({"grammar": 'root ::= x x?\nx ::= "ab" | "ba"'}, ["ab", "ba", *PAIRS]),
    ({"grammar": 'start: "a" inner "c"\ninner: "b"~1..3'}, ["abc", "abbc", "abbbc"]),
    ({"grammar": 'start: even\neven: "b" even "b" | "a"'}, PALINDROMES),
]


@pytest.mark.parametrize(("form", "language"), LANGUAGES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_mask_is_that_of_brute_force(
    form: dict[str, Any], language: list[str], data: Any
) -> None:
    follow(begin(TINY, **form), language, lambda ids: data.draw(st.sampled_from(ids[:9])))


class SpacedTokenizer(TinyTokenizer):
    """Puts something before every text, as sentencepiece's tokenizers do."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [9, *super().encode(text)]


def test_forced_text_where_the_tokenizer_spells_another() -> None:
    grammar = begin(compiler(SpacedTokenizer(), VOCAB, [EOS]), regex="abcéx")
    output = b""
    while not grammar.complete:
        token_id = min(allowed(grammar, VOCAB))
        assert grammar.accept(token_id) is None
        output += TOKENS[token_id]
    assert output.decode() == "abcéx"


def test_any_text_is_a_choice() -> None:
    odd = ["a.b", "a\nb", "[x]", "\\d", "a/b", "é#\u200b", "😀 ", "a&~b", '"', "x{2}", "\x00"]
    for text in odd:
        grammar = begin(BYTES, choice=[*odd, *(f"{text}{index}" for index in range(3000))])
        assert [grammar.accept(byte) for byte in text.encode()] == [None] * len(text.encode())
        assert 257 in allowed(grammar, BYTES_VOCAB)


def test_a_token_outside_the_grammar_is_told() -> None:
    grammar = begin(TINY, regex="ab")
    assert "satisfy the grammar" in (grammar.accept(2) or "")


def test_tokens_can_be_taken_back() -> None:
    grammar = begin(TINY, regex="(ab|c){0,3}")
    before = allowed(grammar, VOCAB)
    for token_ids in ([3, 2], [0, 1, EOS], [12]):
        for token_id in token_ids:
            assert grammar.accept(token_id) is None
        grammar.rollback(len(token_ids))
        assert allowed(grammar, VOCAB) == before
        assert not grammar.complete


def test_choices_of_one_prompt_have_places_of_their_own() -> None:
    params = Params(regex="ab*")
    TINY.check(params)
    first, second = (TINY.grammar(TINY.start(params).result(), False) for _ in range(2))
    assert first.accept(0) is None
    assert allowed(second, VOCAB) == {0, 3, 11}
    assert allowed(first, VOCAB) == {1, 6, EOS, OTHER_EOS}


def test_a_caller_who_ignores_the_end_gets_it_where_nothing_else_can_follow() -> None:
    grammar = begin(TINY, ignore_eos=True, regex="a{1,3}")
    assert grammar.accept(0) is None
    assert allowed(grammar, VOCAB) == {0, 11}
    assert grammar.accept(0) is None
    assert grammar.accept(0) is None
    assert grammar.complete


@pytest.mark.parametrize("vocab_size", [VOCAB, 64, 65])
def test_rows_of_masks(vocab_size: int) -> None:
    grammars = compiler(TinyTokenizer(), vocab_size, [EOS])
    row_bytes = (vocab_size + 31) // 32 * 4
    several = [begin(grammars, regex="a"), None, begin(grammars, regex="b"), None]
    masks = fill_masks(several, vocab_size)
    assert len(masks) == 4 * row_bytes
    for row, grammar in enumerate(several):
        own = masks[row * row_bytes : (row + 1) * row_bytes]
        assert own == (
            b"\xff" * row_bytes if grammar is None else fill_masks([grammar], vocab_size)
        )
    assert fill_masks([], vocab_size) == b""


# -- thoughts


@pytest.mark.parametrize(
    ("thoughts", "text", "ok"),
    [
        ("open", "hm {}</think>\n\n12", True),
        ("open", "12", True),  # still thoughts
        ("open", "hm</think>x", False),
        ("optional", "12", True),
        ("optional", "<think>hm</think>12", True),
        ("optional", "hm", False),
        ("none", "<think>", False),
    ],
)
def test_thoughts_are_free(thoughts: Any, text: str, ok: bool) -> None:
    grammar = begin(BYTES, regex="[0-9]+", thoughts=thoughts)
    assert all(grammar.accept(byte) is None for byte in text.encode()) == ok


# -- what is no grammar

DEEP = '{"items":' * 300 + "{}" + "}" * 300
INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"json": 5}, ".json must be a JSON schema"),
    ({"json": "{"}, ".json is no valid JSON"),
    ({"json": "[" * 100_000}, ".json is no valid JSON"),
    ({"json": {"enum": [float("nan")]}}, ".json is no JSON"),
    ({"json": {"const": {1, 2}}}, ".json is no JSON"),
    ({"json": {"type": "strin"}}, ".json: Invalid type"),
    (
        {"json": {"properties": {"a": {"items": {"type": "strin"}}}}},
        ".json['properties']['a']['items']: Invalid type",
    ),
    ({"json": {"anyOf": [{"type": "null"}, {"not": {}}]}}, ".json['anyOf'][1]: Unimplemented"),
    (
        {"json": {"$defs": {"x": {"uniqueItems": True}}, "$ref": "#/$defs/x"}},
        ".json['$defs']['x']: Unimplemented",
    ),
    ({"json": {"$ref": "https://example.org/schema"}}, "does not fetch"),
    ({"json": {"$ref": "#"}}, "no output can fulfil it"),
    ({"json": {"$ref": "#/$defs/none"}}, ".json: "),
    ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group"),
    ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
    ({"regex": 5}, ".regex must be a string"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "(a)\\1"}, "backreferences"),
    ({"regex": "[^\\s\\S]"}, "no output can fulfil it"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most 131072"),
    ({"choice": "ab"}, ".choice must be a list"),
    ({"choice": []}, ".choice must be a list"),
    ({"choice": ["a", 5]}, ".choice[1] must be a string"),
    ({"choice": ["a", ""]}, ".choice[1] must be a string that is not empty"),
    ({"choice": ["a"] * 20_000}, "at most 16384"),
    ({"grammar": ""}, ".grammar: "),
    ({"grammar": "start: ("}, "Expected token"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"grammar": "root ::= foo"}, "'foo' not found"),
    ({"grammar": "root ::= " + "(" * 50_000}, "nested too deeply"),
    ({"json": {"items": {"items": json.loads(DEEP)}}}, "nested too deeply"),
    ({"json_object": 1}, ".json_object must be true or false"),
]


@pytest.mark.parametrize(("form", "text"), INVALID, ids=range(len(INVALID)))
def test_what_is_no_grammar_is_told_with_its_place(form: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        BYTES.check(Params(**form))
    assert text in str(raised.value)
    assert raised.value.param == "structured_outputs"


def test_an_error_names_the_field_that_it_came_in() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        BYTES.check(Params(json={"type": "x"}, place="response_format.json_schema.schema"))
    assert str(raised.value).startswith("response_format.json_schema.schema: Invalid type")
    assert raised.value.param == "response_format"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


PATHOLOGICAL: list[dict[str, Any]] = [
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "(.*a){60}"},
    {"regex": "(.|\\n)*a(.|\\n){300}"},
    {"regex": "(a|b|ab)*c" * 500},
    {"choice": [f"value {index}" for index in range(5_000)]},
    {"json": deep(40)},
    {"json": deep(2000)},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    {"json": {"type": "string", "minLength": 10**7}},
    {"json": {"properties": {f"p{index}": {"type": "string"} for index in range(1000)}}},
    {"json": {"allOf": [{"anyOf": [deep(1), deep(2)]}] * 20}},
    {"grammar": 'start: s\ns: s s s | s s | "a" | "a" "a"'},
    {"grammar": "start: x* x* x* x* x* x*\nx: /[a-z ]{1,5}/ | /[a-z]{2}/"},
]


@pytest.mark.parametrize("form", PATHOLOGICAL, ids=range(len(PATHOLOGICAL)))
def test_a_pathological_grammar_is_followed_or_refused(form: dict[str, Any]) -> None:
    """What it costs is bounded by a count of operations; nothing here may hang or run out."""
    try:
        grammar = begin(BYTES, **form)
    except InvalidRequestError:
        return
    for step in range(60):
        tokens = sorted(allowed(grammar, BYTES_VOCAB))
        if not tokens or grammar.accept(tokens[step % len(tokens)]) is not None or grammar.complete:
            return


BYTES_VOCAB = ByteTokenizer.vocab_size


# -- compiling


def test_a_model_without_an_end_has_no_grammars() -> None:
    class Endless(TinyTokenizer):
        eos_token_id = None  # type: ignore[assignment]

    with pytest.raises(InvalidRequestError, match="regex needs a token of end of sequence"):
        begin(compiler(Endless(), VOCAB, []), regex="a")


def test_equal_grammars_are_compiled_once() -> None:
    first = BYTES.start(Params(json={"type": "integer", "minimum": 7}))
    assert BYTES.start(Params(json='{"type": "integer", "minimum": 7}')) is first
    assert BYTES.start(Params(json={"type": "integer", "minimum": 8})) is not first


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = compiler(ByteTokenizer(), BYTES_VOCAB, [257])
    monkeypatch.setattr(grammar_compiler, "CACHED_GRAMMARS", 3)
    futures = [grammars.start(Params(regex="a" * n)) for n in range(1, 6)]
    wait(futures)
    assert [grammars.start(Params(regex="a" * n)) is futures[n - 1] for n in (5, 4, 3)] == [
        True
    ] * 3
    assert grammars.start(Params(regex="a")) is not futures[0]
    monkeypatch.setattr(grammar_compiler, "CACHED_CHARS", 20)
    last = grammars.start(Params(regex="b" * 100))
    assert grammars.start(Params(regex="b" * 100)) is last
    assert grammars.start(Params(regex="aaa")) is not futures[2]


async def test_one_that_takes_too_long_is_refused_and_stalls_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = compiler(ByteTokenizer(), BYTES_VOCAB, [257])
    let_go, compile_really = threading.Event(), grammars._compile

    def compile_slowly(spec: Any) -> Any:
        if spec[1] == "slow":
            let_go.wait()
        return compile_really(spec)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 0.01)
    try:
        with pytest.raises(InvalidRequestError, match="regex is too complex"):
            await grammars.compiled(Params(regex="slow"))
        with pytest.raises(InvalidRequestError, match="regex is too complex"):
            grammars.check(Params(regex="slow"))
        monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 60.0)
        await grammars.compiled(Params(regex="quick"))
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            await grammars.compiled(Params(regex="(a"))
    finally:
        let_go.set()
    await grammars.compiled(Params(regex="slow"))
