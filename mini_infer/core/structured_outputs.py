"""What an output may look like: a JSON schema, a regular expression, a choice or a grammar.

Names follow vLLM's ``StructuredOutputsParams``. Plain data, which may cross a process boundary:
``runtime/grammar_compiler.py`` makes a grammar of it where the scheduler is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mini_infer.core.errors import InvalidRequestError

MAX_GRAMMAR_CHARS = 2**18
MAX_CHOICES = 2**14
FORMS = ("json", "regex", "choice", "grammar", "json_object")
PARAM = "structured_outputs"

Thoughts = Literal["none", "optional", "open"]
"""May the output begin with ``<think>...</think>``, to which no form applies? "open": the prompt
ends within them."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an output is held to: exactly one of ``FORMS``.

    Raises:
        InvalidRequestError: none of them, several, one of the wrong type, or a very long one.
    """

    json: Any = None
    """A JSON schema: a mapping, its text, or a pydantic model. Kept as text."""
    regex: str | None = None
    """The whole output matches it; in the syntax of Rust's ``regex``, without look-around."""
    choice: Sequence[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """Lark's syntax (``start: ...``) or GBNF's, that of llama.cpp (``root ::= ...``)."""
    json_object: bool | None = None
    """True: any JSON object."""
    thoughts: Thoughts = "none"

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.append("json")  # a schema that nothing fulfils, which the compiler says
        if len(given) != 1:
            shown = "none" if not given else " and ".join(given)
            raise InvalidRequestError(
                f"{PARAM} needs exactly one of {', '.join(FORMS)}, got {shown}", PARAM
            )
        [name] = given
        if name == "json":
            object.__setattr__(self, "json", _schema_text(self.json))
        elif name == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        elif name == "json_object":
            if self.json_object is not True:
                raise InvalidRequestError(f"{PARAM}.json_object must be true or false", PARAM)
        elif not isinstance(getattr(self, name), str):
            raise InvalidRequestError(f"{PARAM}.{name} must be a string", PARAM)
        _, text = self.spec
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"{PARAM}.{name} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are "
                "allowed",
                PARAM,
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"{PARAM}.{name} holds half of a surrogate pair, which is no text", PARAM
            ) from None

    @property
    def spec(self) -> tuple[str, str]:
        """The form's name, and its text: what two equal grammars have in common."""
        if self.json is not None:
            return "json", str(self.json)
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(self.choice, ensure_ascii=False)
        if self.grammar is not None:
            return "grammar", self.grammar
        return "json", '{"type": "object"}'


def _schema_text(schema: Any) -> str:
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        if len(schema) <= MAX_GRAMMAR_CHARS:
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"{PARAM}.json is no valid JSON: {error}", PARAM
                ) from None
        else:
            return schema
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(
            f"{PARAM}.json must be a JSON schema: an object, its text, or a pydantic model; got "
            f"{schema!r:.80}",
            PARAM,
        )
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{PARAM}.json can't be written as JSON: {error}", PARAM
        ) from None


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str | Mapping) or not isinstance(choices, Sequence) or not choices:
        raise InvalidRequestError(
            f"{PARAM}.choice must be a list of one string or more, got {choices!r:.80}", PARAM
        )
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(
            f"{PARAM}.choice has {len(choices)} entries, at most {MAX_CHOICES} are allowed", PARAM
        )
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidRequestError(
                f"{PARAM}.choice[{index}] must be a string that is not empty, got {choice!r:.80}",
                PARAM,
            )
    return tuple(choices)
