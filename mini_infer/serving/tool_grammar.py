"""Grammars, in Lark's syntax, of the calls that a model may or must make.

They spell calls exactly as the model's chat template taught it, so that little is forced on it: a
constraint to a form that the model was not trained on makes its answers worse. Schemas of
parameters stand in them as they are, each for itself, so that their references hold.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mini_infer.runtime.grammar_compiler import JSON_OPTIONS, literal
from mini_infer.serving.tool_calls import CLOSE, OPEN, PYTHON_TAG, HermesToolParser

if TYPE_CHECKING:
    from collections.abc import Callable

    from mini_infer.runtime.tokenizer import Tokenizer
    from mini_infer.serving.tool_calls import ToolParser

Tool = Mapping[str, Any]


def tool_grammar(
    tokenizer: "Tokenizer",
    parser: "Callable[[], ToolParser]",
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """What an answer may be: calls of ``tools`` in the form that ``parser`` reads, ``required`` or
    beside text, one or, if ``parallel``, several.

    ``answer`` is a schema that an answer without calls fulfils; any text without it. Where calls
    are not required, those of tools that are not ``strict`` have any arguments.
    """
    form = _hermes if parser is HermesToolParser else _llama
    rules = form(tokenizer, required, parallel, answer is not None)
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    key = "arguments" if parser is HermesToolParser else "parameters"
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        # In the lexemes of JSON: an answer's schema may begin alike, and lexers do not go back.
        start = " ".join(
            map(_quoted, ("{", '"name"', ":", " ", name, ",", " ", f'"{key}"', ":", " "))
        )
        rules.append(f'call_{index}: {start} parameters_{index} "}}"')
        schema: Mapping[str, Any] = {"type": "object"}
        if required or function.get("strict"):
            schema = parameters_schema(function.get("parameters"))
        rules.append(f"parameters_{index}: %json {_schema(schema)}")
    if answer is not None:
        rules.append(f"answer: %json {_schema(answer)}")
    return "\n".join(rules)


def parameters_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A function's parameters as the schema of an object; without any, of an empty one."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "type" in parameters or "$ref" in parameters:
        return parameters
    return {"type": "object", **parameters}


def _hermes(tokenizer: "Tokenizer", required: bool, parallel: bool, has_answer: bool) -> list[str]:
    """``<tool_call>``, an object and ``</tool_call>`` on lines of their own."""
    begin, end = literal(tokenizer, OPEN), literal(tokenizer, CLOSE)
    body = rf'"\n" call "\n" {end}'
    if required or has_answer:
        calls = f"{begin} {body}"
        if parallel:
            calls += rf' ("\n" {begin} {body})*'
        return [f"start: {calls}" + (" | answer" if has_answer and not required else "")]
    if begin.startswith("<["):  # a token of its own, which no text contains
        times = "*" if parallel else "?"
        return [f"start: (TEXT {begin} {body}){times} TEXT", r"TEXT: /(?s:.)*/"]
    times = "*" if parallel else "?"
    return [
        f"start: (lead {body}){times} TEXT",
        f"lead[suffix={begin}]: /(?s:.)*/",
        f"TEXT: /(?s:.)*/ & ~/(?s:.)*{_escaped(OPEN)}(?s:.)*/",
    ]


def _llama(tokenizer: "Tokenizer", required: bool, parallel: bool, has_answer: bool) -> list[str]:
    """Objects, with a semicolon between them."""
    calls = 'call ("; " call)*' if parallel else "call"
    if required:
        return [f"start: {calls}"]
    if has_answer:
        return [f"start: {calls} | answer"]
    tag = literal(tokenizer, PYTHON_TAG)
    escaped = "" if tag.startswith("<[") else "|" + _escaped(PYTHON_TAG)
    return [
        f"start: {calls} | TEXT",
        rf"TEXT: /(?s:.)*/ & ~/\s*(\{{{escaped})(?s:.)*/",
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(tag: str) -> str:
    return tag.replace("|", r"\|").replace("/", r"\/")


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
