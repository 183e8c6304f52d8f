"""What an output may look like: a JSON schema, a regular expression, a choice or a grammar.

Names follow vLLM's ``StructuredOutputsParams``. Plain data, which may cross a process boundary:
``runtime/grammar_compiler.py`` makes a grammar of it where the scheduler is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mini_infer.core.errors import InvalidRequestError

MAX_GRAMMAR_CHARS = 2**17
MAX_CHOICES = 2**14
FORMS = ("json", "regex", "choice", "grammar", "json_object")
PARAM = "structured_outputs"
FORM_FAILED = "the output can't be held to its form: "
"""How the reason begins why an output ended with an error that was its form's, not the model's."""

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
    place: str = ""
    """What errors call it, where it came in another field: "response_format.json_schema.schema"."""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            shown = "none" if not given else " and ".join(given)
            raise InvalidRequestError(
                f"{PARAM} needs exactly one of {', '.join(FORMS)}, got {shown}", PARAM
            )
        [name] = given
        value = getattr(self, name)
        if name == "json":
            object.__setattr__(self, "json", self._schema_text(value))
        elif name == "choice":
            object.__setattr__(self, "choice", self._choices(value))
        elif not isinstance(value, bool if name == "json_object" else str):
            kind = "true or false" if name == "json_object" else "a string"
            raise self.error(f"must be {kind}, got {_kind(value)}")
        text = self.spec[1]
        if len(text) > MAX_GRAMMAR_CHARS:
            raise self.error(f"has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.error("holds half of a surrogate pair, which is no text") from None

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

    def error(self, problem: str, within: str = "") -> InvalidRequestError:
        """An error that names the place: ``within`` is a path in the form."""
        name = next((name for name in FORMS if getattr(self, name) not in (None, False)), "json")
        place = self.place or f"{PARAM}.{name}"
        joint = " " if problem.startswith(("must", "has", "holds", "is", "needs")) else ": "
        return InvalidRequestError(
            f"{place}{within}{joint}{problem}", place.partition(".")[0].partition("[")[0]
        )

    def _schema_text(self, schema: Any) -> str:
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            if len(schema) > MAX_GRAMMAR_CHARS:
                return schema
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise self.error(f"is no valid JSON: {error}") from None
        if not isinstance(schema, Mapping):
            raise self.error(
                "must be a JSON schema: an object, its text, or a pydantic model; got "
                f"{_kind(schema)}"
            )
        try:
            return json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.error(f"is no JSON: {error}") from None

    def _choices(self, choices: Any) -> tuple[str, ...]:
        if isinstance(choices, str | Mapping) or not isinstance(choices, Sequence) or not choices:
            raise self.error(f"must be a list of one string or more, got {_kind(choices)}")
        if len(choices) > MAX_CHOICES:
            raise self.error(f"has {len(choices)} entries, at most {MAX_CHOICES} are allowed")
        for index, choice in enumerate(choices):
            if not isinstance(choice, str) or not choice:
                raise self.error(
                    f"must be a string that is not empty, got {_kind(choice)}", f"[{index}]"
                )
        return tuple(choices)


def form_failure(stop_reason: object) -> InvalidRequestError | None:
    """The error of an output that ended for ``FORM_FAILED``; None for another one."""
    text = str(stop_reason)
    return InvalidRequestError(text, PARAM) if text.startswith(FORM_FAILED) else None


def _kind(value: object) -> str:
    """What a value is; not its text, which of one that is nested deeply can't be had."""
    return f"an empty {type(value).__name__}" if value in ("", []) else f"a {type(value).__name__}"
