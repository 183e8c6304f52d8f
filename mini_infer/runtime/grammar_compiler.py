"""From a schema, expression, choice or grammar to a ``Grammar``, or to an error that says where.

llguidance does the work: an Earley parser over a lexer of derivatives, whose states are made as an
output reaches them (github.com/guidance-ai/llguidance). Compiling is therefore a matter of
milliseconds, and a budget that counts operations bounds it and every mask.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.structured_outputs import PARAM, StructuredOutputsParams, Thoughts
from mini_infer.runtime.grammar import Grammar
from mini_infer.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILE_SECONDS = 5.0
COMPILE_THREADS = 2
CACHED_GRAMMARS = 128
CACHED_CHARS = 2**22
"""Of the texts of cached grammars: what they take grows with it."""
MAX_LEXER_STATES = 10_000
"""Of one output: a state takes 1 to 2 kB."""
STACK_BYTES = 2**28
"""Of a thread that compiles: llguidance goes down a chain of references call by call, and one that
fills the longest form takes some 60 MB. What is not used is only addresses."""
MAX_TRIES = 200
"""Parts of a schema that are compiled alone to find the place of an error."""
JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,32}", "coerce_one_of": True}
"""What may stand between the tokens of JSON: one space, or a new line and its indentation. A small
model that may write any number of spaces often never stops. ``oneOf`` is read as ``anyOf`` where a
parser can't tell its branches apart."""

OPEN_THOUGHTS, CLOSE_THOUGHTS = "<think>", "</think>"

NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
TOOL_PARAMETERS = re.compile(r"^parameters_(\d+): %json (.*)$", re.MULTILINE)
"""Where a grammar of tool calls (``serving/tool_grammar.py``) has a tool's schema."""

Spec = tuple[str, str, Thoughts]
_stack_size = threading.Lock()


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
        self._lock = threading.Lock()

    def start(self, params: StructuredOutputsParams) -> "Future[LLMatcher]":
        """Begins to compile, unless it is known: a finished ``Future`` needs no waiting."""
        spec = (*params.spec, params.thoughts)
        with self._lock:
            future = self._cache.get(spec)
            if future is None or future.cancelled() or (future.done() and future.exception()):
                future = self._cache[spec] = self._submit(spec)
            self._cache.move_to_end(spec)
            while len(self._cache) > 1 and (
                len(self._cache) > CACHED_GRAMMARS
                or sum(len(text) for _, text, _ in self._cache) > CACHED_CHARS
            ):
                self._drop(self._cache.popitem(last=False)[1])
            return future

    def check(self, params: StructuredOutputsParams) -> None:
        """Waits until it is compiled.

        Raises:
            InvalidRequestError: it is invalid, asks for what is not supported, or takes too long.
        """
        future = self.start(params)
        wait([future], self._patience())
        self._raise_failure(params, future)

    async def compiled(self, params: StructuredOutputsParams) -> None:
        """``check``, for whoever has other work while it waits."""
        import asyncio  # the engine's process, which starts with every server, needs none of it

        future = self.start(params)
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([waiting], timeout=self._patience())
        self._raise_failure(params, future)

    def compile_alone(self, spec: Spec) -> None:
        """Compiles and forgets. Raises GrammarError."""
        self._submit(spec).result()

    def grammar(self, matcher: "LLMatcher", ignore_eos: bool) -> Grammar:
        """The beginning of ``matcher``'s grammar, for one choice."""
        return Grammar(matcher.deep_copy(), self._eos_token_ids if ignore_eos else ())

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(COMPILE_THREADS, "mini-infer-grammar")

    def _submit(self, spec: Spec) -> "Future[LLMatcher]":
        with _stack_size:  # of whatever thread is started now
            size = threading.stack_size(STACK_BYTES)
            try:
                return self._threads.submit(self._compile, spec)
            finally:
                threading.stack_size(size)

    def _drop(self, future: "Future[LLMatcher]") -> None:
        """It is kept no longer: who waits for it, if anybody does, gets it all the same."""

    def _patience(self) -> float:
        """Seconds that a caller waits."""
        return COMPILE_SECONDS

    def _unfinished(self, params: StructuredOutputsParams) -> Exception:
        return params.error(
            f"is too complex: it took longer than {COMPILE_SECONDS:g} seconds to compile"
        )

    def _raise_failure(self, params: StructuredOutputsParams, future: "Future[LLMatcher]") -> None:
        if future.cancelled() or not future.done():
            raise self._unfinished(params)
        try:
            future.result()
        except GrammarError as error:
            raise params.error(error.problem, error.within) from None

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise GrammarError("needs a token of end of sequence, and this model has none")
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
        kind, text, _ = spec
        matcher, error = self._try(*spec)
        if matcher is not None:
            return matcher
        if kind == "json":
            raise GrammarError(error, self._within(text, error))
        if kind == "regex":  # llguidance shows it within a grammar of its own making
            error = re.sub(r"^at \d+\(\d+\): |\n +1 \| (?s:.)*", "", error)
        for part in TOOL_PARAMETERS.finditer(text):
            _, alone = self._try("json", part[2])
            if alone:
                within = f"[{part[1]}].function.parameters{self._within(part[2], alone)}"
                raise GrammarError(alone, within)
        raise GrammarError(error)

    def _try(
        self, kind: str, text: str, thoughts: Thoughts = "none"
    ) -> "tuple[LLMatcher | None, str]":
        """A grammar's matcher, or why it can't be used: also one that allows no output."""
        from llguidance import LLMatcher

        try:
            grammar = _grammar(self._tokenizer, kind, text, thoughts)
        except (ValueError, RecursionError) as error:
            too_deep = "recursion" in str(error)  # of Python, or of what reads JSON in Rust
            return None, "it is nested too deeply" if too_deep else str(error)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            return None, matcher.get_error().strip()
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            return None, "no output can fulfil it, or it is too complex"
        return matcher, ""

    def _within(self, text: str, error: str) -> str:
        """The path of the innermost part of a schema that alone gives the same error."""
        root = json.loads(text)
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        path, schema, num_tries = "", root, 0
        while True:
            for step, part in _parts(schema):
                num_tries += 1
                if num_tries > MAX_TRIES:
                    return path
                if self._try("json", json.dumps({**shared, **part}))[1] == error:
                    path += step
                    schema = part
                    break
            else:
                return path


class GrammarError(InvalidRequestError):
    """A form that can't be compiled: the ``problem``, and the path ``within`` the form."""

    def __init__(self, problem: str, within: str = "") -> None:
        super().__init__(f"{within}: {problem}" if within else problem, PARAM)
        self.problem, self.within = problem, within


class _Vocabulary:
    """What llguidance asks of a tokenizer.

    It tokenizes text that a grammar forces, of which it then allows only these tokens: those that
    the model would see in a prompt. Where the tokenizer says something else, as sentencepiece's
    does with a space before every text, the longest tokens that fit stand in.
    """

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [t for t in range(vocab_size) if tokenizer.is_special(t)]

    def __call__(self, text: str) -> Sequence[int]:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        said = b"".join(map(self._tokenizer.token_bytes, token_ids))
        if said == text.encode() and not any(map(self._tokenizer.is_special, token_ids)):
            return token_ids
        return list(self._longest_tokens(text.encode()))

    def _longest_tokens(self, data: bytes) -> Iterator[int]:
        while data:
            length = next(n for n in range(self._longest, 0, -1) if data[:n] in self._ids)
            yield self._ids[data[:length]]
            data = data[length:]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {
            token: token_id
            for token_id, token in enumerate(self.tokens)
            if token and token_id not in special
        }

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


def _grammar(tokenizer: Tokenizer, kind: str, text: str, thoughts: Thoughts = "none") -> str:
    """llguidance's form of a grammar. Raises ValueError or RecursionError."""
    from llguidance import LLMatcher, grammar_from

    part: dict[str, Any]
    if kind == "json":
        overrides: Any = JSON_OPTIONS
        [part] = json.loads(LLMatcher.grammar_from_json_schema(text, overrides=overrides))[
            "grammars"
        ]
    elif kind == "grammar":
        part = {"lark_grammar": grammar_from("grammar", text)}
    else:
        # Thousands of choices are one lexeme so; as alternatives they would exceed a row's bound.
        regex = "|".join(map(_literal_regex, json.loads(text))) if kind == "choice" else text
        [part] = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    if thoughts == "none":
        return json.dumps({"grammars": [part]})
    start = {"lark_grammar": _thoughts(tokenizer, thoughts)}
    return json.dumps({"grammars": [start, {**part, "name": "answer"}]})


def _literal_regex(text: str) -> str:
    """A regular expression, in the syntax of Rust's ``regex``, of one text."""
    return re.sub(r"[^\w ]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


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


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right within a schema, each with its path."""
    for key, value in schema.items():
        inner: Iterable[tuple[str | int, Any]] = ()
        if isinstance(value, list):
            inner = enumerate(value)
        elif isinstance(value, dict) and key in NAMED_PARTS:
            inner = value.items()
        elif isinstance(value, dict):
            yield f"[{key!r}]", value
        for name, part in inner:
            if isinstance(part, dict):
                yield f"[{key!r}][{name!r}]", part
