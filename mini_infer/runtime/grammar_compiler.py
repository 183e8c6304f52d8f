"""From a schema, expression, choice or grammar to a ``Grammar``, or to an error that says where.

llguidance does the work: an Earley parser over a lexer of derivatives, whose states are made as an
output reaches them (github.com/guidance-ai/llguidance). Compiling is therefore a matter of
milliseconds, and a budget that counts operations bounds it and every mask.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidRequestError, UnsupportedModelError
from mini_infer.core.structured_outputs import PARAM, StructuredOutputsParams, Thoughts
from mini_infer.runtime.grammar import Grammar
from mini_infer.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 5.0
COMPILE_THREADS = 2
CACHED_GRAMMARS = 128
CACHED_CHARS = 2**22
"""Of the texts of cached grammars: what they take grows with it."""
MAX_LEXER_STATES = 50_000
"""Of one output: a state takes 1 to 2 kB."""
MAX_TRIES = 200
"""Parts of a schema that are compiled alone to find the place of an error."""
WHITE_SPACE = r" |\n {0,32}"
"""Allowed between the tokens of JSON: one space, or a new line and its indentation. A small model
that may write any number of spaces often never stops."""

OPEN_THOUGHTS, CLOSE_THOUGHTS = "<think>", "</think>"

Spec = tuple[str, str, Thoughts]


class GrammarCompiler:
    """Compiles for one tokenizer, in threads of its own, and keeps what it compiled last.

    Thread-safe. Nothing is imported or started before the first grammar.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        model = config.model_config
        eos_token_ids = {*model.eos_token_ids, tokenizer.eos_token_id}
        self._tokenizer = tokenizer
        self._vocab_size = model.vocab_size  # that of the logits; the tokenizer's may be less
        self._eos_token_ids = sorted(
            token_id
            for token_id in eos_token_ids
            if token_id is not None and 0 <= token_id < model.vocab_size
        )
        self._cache: OrderedDict[Spec, Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()

    def start(self, params: StructuredOutputsParams) -> "Future[LLMatcher]":
        """Begins to compile, unless it is known: a finished ``Future`` needs no waiting."""
        spec = (*params.spec, params.thoughts)
        with self._lock:
            future = self._cache.get(spec)
            if future is None or (future.done() and future.exception() is not None):
                future = self._cache[spec] = self._threads.submit(self._compile, spec)
            self._cache.move_to_end(spec)
            while len(self._cache) > 1 and (
                len(self._cache) > CACHED_GRAMMARS
                or sum(len(text) for _, text, _ in self._cache) > CACHED_CHARS
            ):
                self._cache.popitem(last=False)
            return future

    def check(self, params: StructuredOutputsParams) -> None:
        """Waits until it is compiled.

        Raises:
            InvalidRequestError: it is invalid, asks for what is not supported, or takes too long.
        """
        try:
            self.start(params).result(COMPILE_SECONDS)
        except FutureTimeoutError:
            raise InvalidRequestError(
                f"{PARAM}: the grammar took longer than {COMPILE_SECONDS:g} seconds to compile: "
                "simplify it",
                PARAM,
            ) from None

    def grammar(self, matcher: "LLMatcher", ignore_eos: bool) -> Grammar:
        """The beginning of ``matcher``'s grammar, for one choice."""
        return Grammar(matcher.deep_copy(), self._eos_token_ids if ignore_eos else ())

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(COMPILE_THREADS, "mini-infer-grammar")

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise UnsupportedModelError(
                "structured outputs need a token of end of sequence, and this model has none"
            )
        return LLTokenizer(
            _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0]),  # type: ignore[arg-type]
            n_vocab=self._vocab_size,
            eos_token=self._eos_token_ids,
        )

    @cached_property
    def _limits(self) -> "LLParserLimits":
        from llguidance import LLParserLimits

        return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    def _compile(self, spec: Spec) -> "LLMatcher":
        kind, text, thoughts = spec
        try:
            matcher = self._try(_grammar(self._tokenizer, kind, text, thoughts))
            error = _error_of(matcher)
        except (ValueError, RecursionError) as raised:
            error = str(raised)
        if not error:
            return matcher
        place = ""
        if kind == "json":
            place = "".join(f"[{key!r}]" for key in self._place(text, error))
        raise InvalidRequestError(f"{PARAM}.{kind}{place}: {error}", PARAM)

    def _try(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)

    def _place(self, text: str, error: str) -> list[str | int]:
        """The path of the innermost part of a schema that alone gives the same error."""
        root = json.loads(text)
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        path: list[str | int] = []
        schema, tries = root, 0
        while True:
            for step, part in _parts(schema):
                tries += 1
                if tries > MAX_TRIES:
                    return path
                alone = {**shared, **part} if "$ref" in json.dumps(part) else part
                grammar = _grammar(self._tokenizer, "json", json.dumps(alone))
                if _error_of(self._try(grammar)) == error:
                    path += step
                    schema = part
                    break
            else:
                return path


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [t for t in range(vocab_size) if tokenizer.is_special(t)]

    def __call__(self, text: bytes | str) -> Sequence[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _grammar(tokenizer: Tokenizer, kind: str, text: str, thoughts: Thoughts = "none") -> str:
    """llguidance's form of a grammar. Raises ValueError or RecursionError."""
    from llguidance import LLMatcher, grammar_from

    part: dict[str, Any]
    if kind == "json":
        overrides: Any = {"whitespace_pattern": WHITE_SPACE}
        [part] = json.loads(LLMatcher.grammar_from_json_schema(text, overrides=overrides))[
            "grammars"
        ]
    elif kind == "regex":
        [part] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
    else:
        part = {"lark_grammar": grammar_from("choice" if kind == "choice" else "grammar", text)}
    if thoughts == "none":
        return json.dumps({"grammars": [part]})
    start = {"lark_grammar": _thoughts(tokenizer, thoughts)}
    return json.dumps({"grammars": [start, {**part, "name": "answer"}]})


def _thoughts(tokenizer: Tokenizer, thoughts: Thoughts) -> str:
    """A grammar, in Lark's syntax, of what a reasoning model thinks before its @answer."""
    begin, end = literal(tokenizer, OPEN_THOUGHTS), literal(tokenizer, CLOSE_THOUGHTS)
    alone = end.startswith("<[")  # a token of its own, which no text contains
    free = f"free: /(?s:.)*/ {end}" if alone else f"free[suffix={end}]: /(?s:.)*/"
    rest = "free space" if thoughts == "open" else f"({begin} free space)?"
    return f"start: {rest} @answer\n{free}\nspace: /\\s{{0,4}}/\n"


def literal(tokenizer: Tokenizer, text: str) -> str:
    """``text`` in Lark's syntax: as the special token that it may be, or as its characters."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) == 1 and tokenizer.is_special(token_ids[0]):
        return f"<[{token_ids[0]}]>"
    return json.dumps(text, ensure_ascii=False)


def _error_of(matcher: "LLMatcher") -> str:
    """Why a grammar can't be used, "" if it can: also one that does not allow any output."""
    if not matcher.is_error():
        first = matcher.deep_copy()
        first.compute_bitmask()
        if not first.is_error():
            return ""
        return "no output can fulfil it, or it is too complex"
    return matcher.get_error().strip()


def _parts(schema: Any) -> Iterator[tuple[list[str | int], dict[str, Any]]]:
    """The schemas right within a schema, with the path to each."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if isinstance(value, list):
            inner: Any = enumerate(value)
        elif isinstance(value, dict) and key in NAMED_PARTS:
            inner = value.items()
        else:
            if isinstance(value, dict):
                yield [key], value
            continue
        for name, part in inner:
            if isinstance(part, dict):
                yield [key, name], part


NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
