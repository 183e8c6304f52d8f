"""Grammars of tool calls, token by token: tags that are special tokens, and tags that are text."""

from dataclasses import replace
from typing import Any

import pytest

from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.grammar_compiler import GrammarCompiler
from mini_infer.serving.tool_calls import HermesToolParser, LlamaToolParser
from mini_infer.serving.tool_grammar import tool_grammar
from tests.runtime.fake_executor import TINY_MODEL, make_config

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")


class TaggedTokenizer(ByteTokenizer):
    """Tags are special tokens of it: ids 256 and up, after one of end of sequence."""

    vocab_size = 257 + len(TAGS)
    eos_token_id = 256

    def token_bytes(self, token_id: int) -> bytes:
        tags = [b"<|eos|>", *map(str.encode, TAGS)]
        return tags[token_id - 256] if token_id >= 256 else bytes((token_id,))

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        for index, tag in enumerate(TAGS):
            before, found, after = text.partition(tag)
            if found:
                return [*self.encode(before), 257 + index, *self.encode(after)]
        return list(text.encode())


PLAIN, TAGGED = ByteTokenizer(), TaggedTokenizer()
TOOLS: list[dict[str, Any]] = [
    {
        "function": {
            "name": "add",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"n": {"$ref": "#/$defs/n"}},
                "required": ["n"],
                "additionalProperties": False,
                "$defs": {"n": {"type": "integer"}},
            },
        }
    },
    {"function": {"name": "stop", "parameters": {"not": {}}}},
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"n": 7}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {"x": []}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"n": 7}}'


def follows(tokenizer: Any, text: str, parser: Any = HermesToolParser, **options: Any) -> bool:
    """Is ``text`` a whole answer under the grammar?"""
    tools = TOOLS[:1] if options.get("required") else TOOLS
    thoughts = options.pop("thoughts", "none")
    grammar = tool_grammar(
        tokenizer, parser, tools, **{"required": False, "parallel": True, **options}
    )
    eos = tokenizer.eos_token_id
    model = replace(TINY_MODEL, vocab_size=tokenizer.vocab_size, eos_token_ids=(eos,))
    compiler = GrammarCompiler(make_config(model_config=model), tokenizer)
    params = StructuredOutputsParams(grammar=grammar, thoughts=thoughts)
    compiler.check(params)
    place = compiler.grammar(compiler.start(params).result(), False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if any(place.accept(token_id) is not None for token_id in tokens):
        return False
    return place.complete or place.accept(eos) is None


@pytest.mark.parametrize("tokenizer", [PLAIN, TAGGED], ids=["plain", "tagged"])
@pytest.mark.parametrize(
    ("text", "options", "ok"),
    [
        ("", {}, True),
        ("Hello <b> {", {}, True),
        (ADD, {}, True),
        (f"I see. {ADD}\n{STOP} Done.", {}, True),
        (f"{ADD}\n{ADD}", {"parallel": False}, False),
        (f"{ADD} Done.", {"parallel": False}, True),
        (ADD.replace("7", '"7"'), {}, False),
        (ADD.replace("add", "sub"), {}, False),
        ("<tool_call>Hello", {}, False),
        ("", {"required": True}, False),
        ("Hello", {"required": True}, False),
        (ADD, {"required": True}, True),
        (f"{ADD}\n{ADD}", {"required": True}, True),
        (f"{ADD}\n{ADD}", {"required": True, "parallel": False}, False),
        (f"{ADD} Done.", {"required": True}, False),
        ('{"a": 1}', {"answer": {"required": ["a"]}}, True),
        ("Hello", {"answer": {"type": "object"}}, False),
        (STOP, {"answer": {"type": "object"}}, True),
        (f"<think>Hm {{}}</think>\n{ADD}", {"required": True, "thoughts": "optional"}, True),
        (f"Hm {{}}</think>\n{ADD}", {"required": True, "thoughts": "open"}, True),
        ("Hm", {"required": True, "thoughts": "open"}, False),
        (ADD, {"required": True, "thoughts": "optional"}, True),
    ],
)
def test_hermes(tokenizer: Any, text: str, options: dict[str, Any], ok: bool) -> None:
    assert follows(tokenizer, text, **options) == ok


@pytest.mark.parametrize("tokenizer", [PLAIN, TAGGED], ids=["plain", "tagged"])
@pytest.mark.parametrize(
    ("text", "options", "ok"),
    [
        ("", {}, True),
        ("Hello { x", {}, True),
        (' {"name": "other"', {}, False),
        (LLAMA, {}, True),
        (f"{LLAMA}; {LLAMA}", {}, True),
        (f"{LLAMA}; {LLAMA}", {"parallel": False}, False),
        (LLAMA.replace("7", "true"), {}, False),
        ("Hello", {"required": True}, False),
        (LLAMA, {"required": True}, True),
        ('{"a": 1}', {"answer": {"required": ["a"]}}, True),
        ('{"name": "x", "b": {}}', {"answer": {"type": "object"}}, True),
        ('{"nam": 1}', {"answer": {"properties": {"nam": {}}}}, True),
        (LLAMA, {"answer": {"required": ["a"]}}, True),
        (f"{LLAMA}; {LLAMA}", {"answer": {"required": ["a"]}}, True),
        (LLAMA.replace("7", "true"), {"answer": {"required": ["a"]}}, False),
    ],
)
def test_llama(tokenizer: Any, text: str, options: dict[str, Any], ok: bool) -> None:
    assert follows(tokenizer, text, LlamaToolParser, **options) == ok
