"""The form that a request holds its answers to, in OpenAI's fields and in vLLM's."""

from collections.abc import Mapping
from typing import Any

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.structured_outputs import FORMS, PARAM, StructuredOutputsParams

FORMAT_TYPES = ("text", "json_object", "json_schema")
NOT_SUPPORTED = (
    "structural_tag",
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
)
"""Of vLLM's ``structured_outputs``."""


def output_form(
    structured_outputs: Mapping[str, Any] | None, response_format: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """What the two fields ask for.

    Raises:
        InvalidRequestError: one of them is malformed, or both ask.
    """
    form = read_format(response_format, "response_format")
    if structured_outputs is None:
        return form
    if form is not None:
        raise InvalidRequestError(f"give either {PARAM} or response_format", PARAM)
    for name, value in structured_outputs.items():
        if name not in FORMS and value is not None and value is not False:
            known = "is not supported" if name in NOT_SUPPORTED else "is not known"
            raise InvalidRequestError(
                f"{PARAM}.{name} {known}: give one of {', '.join(FORMS)}", PARAM
            )
    given: dict[str, Any] = {name: structured_outputs.get(name) for name in FORMS}
    return StructuredOutputsParams(**given)


def read_format(value: Mapping[str, Any] | None, field: str) -> StructuredOutputsParams | None:
    """OpenAI's ``response_format``, or ``text.format`` with the schema's fields right in it.

    ``strict`` makes no difference: answers are held to the schema in any case.
    """
    if value is None:
        return None
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, place=field)
    if kind != "json_schema":
        shown = repr(kind)[:80] if isinstance(kind, str) else type(kind).__name__
        raise InvalidRequestError(
            f"{field}.type must be one of {', '.join(FORMAT_TYPES)}, got {shown}",
            field.partition(".")[0],
        )
    inner: Any = value
    place = field
    if field == "response_format":
        inner, place = value.get("json_schema"), f"{field}.json_schema"
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            f"{place}.schema must be a JSON schema, got {type(schema).__name__}",
            field.partition(".")[0],
        )
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{place}.strict must be true or false", field.partition(".")[0])
    return StructuredOutputsParams(json=schema, place=f"{place}.schema")
