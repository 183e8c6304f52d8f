"""Thoughts, content and tool calls in an answer's text, however the text comes."""

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.serving.held_calls import HeldHermesToolParser
from mini_infer.serving.messages import Message, MessageForm, MessageParser, Part, read_message
from mini_infer.serving.reasoning import Reasoning, continues_reasoning, opens_reasoning
from mini_infer.serving.tool_calls import (
    ArgumentsPiece,
    HermesToolParser,
    LlamaToolParser,
    ToolCall,
    ToolParser,
    tool_parser_for,
)

HERMES = MessageForm(tool_parser=HermesToolParser)
LLAMA = MessageForm(tool_parser=LlamaToolParser)
PLAIN = MessageForm()
F = ToolCall("f", '{"x": 1}')
CALL = '{"name": "f", "arguments": {"x": 1}}'
LLAMA_CALL = '{"name": "f", "parameters": {"x": 1}}'


def joined(parts: list[Part]) -> Message:
    return Message(
        "".join(part for part in parts if isinstance(part, str)),
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        [part for part in parts if isinstance(part, ToolCall)],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", Message("", "", [])),
        ("  Hello \n", Message("  Hello \n", "", [])),
        (f"<tool_call>\n{CALL}\n</tool_call>", Message("", "", [F])),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", Message("", "", [F, F])),
        (f"I look. \n<tool_call>{CALL}</tool_call>\n Done.", Message("I look.Done.", "", [F])),
        (f"<tool_call>{CALL}", Message("", "", [F])),
        ("<tool_call>{broken}</tool_call> x", Message("<tool_call>{broken}</tool_call> x", "", [])),
        ('<tool_call>{"name": "f"', Message('<tool_call>{"name": "f"', "", [])),
        (f"<tool_call>x</tool_call>\n<tool_call>{CALL}</tool_call>",
         Message("<tool_call>x</tool_call>", "", [F])),
        ("<tool_call>[1]</tool_call>", Message("<tool_call>[1]</tool_call>", "", [])),
        ("a <tool_cal", Message("a <tool_cal", "", [])),
        ('<tool_call>{"name": "f"}</tool_call>', Message("", "", [ToolCall("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
         Message("", "", [F])),
        ("<think>\nHm.\n</think>\n\nYes", Message("Yes", "Hm.", [])),
        (f"<think>Hm</think><tool_call>{CALL}</tool_call>", Message("", "Hm", [F])),
        (f"<think><tool_call>{CALL}</tool_call></think>x",
         Message("x", f"<tool_call>{CALL}</tool_call>", [])),
        ("<think>never ends ", Message("", "never ends", [])),
        ("x <think>y</think>", Message("x <think>y</think>", "", [])),
        (" <thin", Message(" <thin", "", [])),
    ],
)  # fmt: skip
def test_hermes(text: str, message: Message) -> None:
    assert read_message(HERMES, text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hello {}", Message("Hello {}", "", [])),
        (LLAMA_CALL, Message("", "", [F])),
        (f" <|python_tag|>{LLAMA_CALL}\n", Message("", "", [F])),
        (f"{LLAMA_CALL}; {LLAMA_CALL}", Message("", "", [F, F])),
        ('{"type": "function", ' + LLAMA_CALL[1:], Message("", "", [F])),
        (f"{LLAMA_CALL} and more", Message(f"{LLAMA_CALL} and more", "", [])),
        ('{"a": 1}', Message('{"a": 1}', "", [])),
        ("{", Message("{", "", [])),
        (" ", Message(" ", "", [])),
        ("<|python_tag|>print(1)", Message("<|python_tag|>print(1)", "", [])),
    ],
)
def test_llama(text: str, message: Message) -> None:
    assert read_message(LLAMA, text) == message


@pytest.mark.parametrize(
    "arguments",
    ["[1]", "5", "NaN", '{"x": NaN}', '{"x": 1e999}', "[" * 5000, '{"x": ' * 5000, "9" * 5000],
    ids=lambda text: text[:12],
)
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read_message(HERMES, text) == Message(text, "", [])


def test_half_a_surrogate_pair_can_be_sent() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'
    [call] = read_message(HERMES, text).calls
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"x": "\ud800"}
    name = '<tool_call>{"name": "\\ud800"}</tool_call>'
    assert read_message(HERMES, name).content == name


def test_one_call_only_where_more_are_not_wanted() -> None:
    form = MessageForm(tool_parser=HermesToolParser, parallel_tool_calls=False)
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>!"
    assert read_message(form, text) == Message("!", "", [F])


def test_thoughts_can_be_left_out() -> None:
    form = MessageForm(include_reasoning=False)
    assert read_message(form, "<think>Hm</think>Yes") == Message("Yes", "", [])


@pytest.mark.parametrize("text", ["Hm\n</think>\nYes", "<think>\nHm</think>Yes"])
def test_thoughts_that_the_prompt_opened(text: str) -> None:
    assert read_message(MessageForm(opens_reasoning=True), text) == Message("Yes", "Hm", [])


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [("x<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False), ("<think>a", False)],
)
def test_what_a_prompt_opens(prompt: str, opens: bool) -> None:
    assert opens_reasoning(prompt) == opens


@pytest.mark.parametrize(
    ("content", "open_"), [("<think>a", True), ("<think>a</think>b", False), ("b", False)]
)
def test_what_a_continued_message_leaves_open(content: str, open_: bool) -> None:
    assert continues_reasoning(content) == open_


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, LLAMA_CALL, " ", "\n", "a", "<",
     "{", "}", ";", "<tool", "é", "<|python_tag|>", "</", '"', "name"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map("".join)
PARSERS: list[Callable[[], ToolParser] | None] = [None, HermesToolParser, LlamaToolParser]


@pytest.mark.parametrize("tool_parser", PARSERS)
@given(text=TEXTS, opened=st.booleans(), parallel=st.booleans(), data=st.data())
def test_any_split_gives_the_same_message(
    tool_parser: Callable[[], ToolParser] | None,
    text: str,
    opened: bool,
    parallel: bool,
    data: st.DataObject,
) -> None:
    form = MessageForm(opened, tool_parser, parallel)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=9).map(sorted))
    parser = MessageParser(form)
    parts: list[Part] = []
    for start, end in pairwise([0, *cuts, len(text)]):
        parts += parser.append(text[start:end])
    parts += parser.finish()
    assert "" not in parts
    assert joined(parts) == read_message(form, text)


@given(text=TEXTS)
def test_without_tags_a_text_is_untouched(text: str) -> None:
    text = text.replace("<", "(")
    assert read_message(HERMES, text) == Message(text, "", [])


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("...<tool_call>...", HermesToolParser),
        ("<tool_call><function=name>", None),
        ('{"name": function name, "parameters": dictionary}', LlamaToolParser),
        ("<|python_tag|>", LlamaToolParser),
        ("[TOOL_CALLS]", None),
    ],
)
def test_the_template_says_which_form_is_read(template: str, parser: type | None) -> None:
    assert tool_parser_for(template) is parser


def test_an_object_that_is_no_call_is_told_of_from_its_first_key() -> None:
    parser = MessageParser(LLAMA)
    assert [parser.append(piece) for piece in ("{\n", ' "na', 'tion"', ": 1")] == [
        [], [], ['{\n "nation"'], [": 1"]
    ]  # fmt: skip


def test_text_is_told_of_as_soon_as_it_can_be_no_tag() -> None:
    parser = MessageParser(PLAIN)
    assert [parser.append(piece) for piece in ("<th", "ough>", " a", "b")] == [
        [], ["<though>"], [" a"], ["b"]
    ]  # fmt: skip


HELD = MessageForm(tool_parser=HeldHermesToolParser)
HELD_CALL = '<tool_call>\n{"name": "f\\"", "arguments": { "x" : "}\\n</tool_call>" }}\n</tool_call>'
HELD_F = ToolCall('f"', '{ "x" : "}\\n</tool_call>" }')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HELD_CALL, Message("", "", [HELD_F])),
        (f"{HELD_CALL}\n{HELD_CALL}", Message("", "", [HELD_F, HELD_F])),
        (f"I look.\n{HELD_CALL}\nDone.", Message("I look.Done.", "", [HELD_F])),
        (f"<think>Hm</think>{HELD_CALL}", Message("", "Hm", [HELD_F])),
        ('<tool_call>\n{"name": "f', Message('<tool_call>\n{"name": "f', "", [])),
        (HELD_CALL[:-20], Message("", "", [ToolCall('f"', '{ "x" : "}\\n</tool_ca')])),
        *((HELD_CALL[:-cut], Message("", "", [HELD_F])) for cut in (3, 12, 13, 14)),
        (HELD_CALL[:-15], Message("", "", [ToolCall('f"', HELD_F.arguments[:-1])])),
        ("no call", Message("no call", "", [])),
    ],
)
def test_calls_that_a_grammar_holds(text: str, message: Message) -> None:
    assert read_message(HELD, text) == message
    for cut in range(len(text) + 1):
        parser = MessageParser(HELD)
        parts = parser.append(text[:cut]) + parser.append(text[cut:]) + parser.finish()
        calls: list[ToolCall] = []
        for part in parts:
            if isinstance(part, ToolCall):
                calls.append(part)
            elif isinstance(part, ArgumentsPiece):
                calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + part.text)
        assert Message(joined(parts).content, joined(parts).reasoning, calls) == message


def test_one_call_of_several_that_a_grammar_holds() -> None:
    form = MessageForm(tool_parser=HeldHermesToolParser, parallel_tool_calls=False)
    assert read_message(form, f"{HELD_CALL}\n{HELD_CALL}").calls == [HELD_F]
