"""SmolLM2-135M-Instruct held to schemas, expressions, choices and grammars."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mini_infer import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.real_model


def closed(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


MAIL = "^[a-z]{1,8}@[a-z]{1,8}\\.org$"
POINTS = {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 2, "maxItems": 3}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": closed(
        name={"type": "string", "maxLength": 12},
        age={"type": "integer", "minimum": 0, "maximum": 130},
        mail={"type": ["string", "null"], "pattern": MAIL},
    ),
    "nested": {"$defs": {"point": closed(x={"type": "number"})}, **closed(path=POINTS)},
    "either": {
        "anyOf": [
            closed(kind={"const": "dog"}, good={"type": "boolean"}),
            {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 4},
        ]
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"The year is (19|20)\d\d, (maybe )?in (May|June)\."},
    "choice": {"choice": ["Paris", "Rome", "São Paulo"]},
    "grammar": {"grammar": 'root ::= sum\nsum ::= n | n " + " n\nn ::= [0-9]{1,3}'},
}
QUESTION = "Tell me about Alice, 31 years old, and her dog. Answer in JSON."


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def texts(request: pytest.FixtureRequest, real_model_folder: Path) -> dict[str, str]:
    """What the model says in each form, all in one batch, with a free answer beside them."""
    held = {name: {"json": schema} for name, schema in SCHEMAS.items()} | FORMS
    params = [
        SamplingParams(
            temperature=0, max_tokens=100, structured_outputs=StructuredOutputsParams(**form)
        )
        for form in held.values()
    ]
    params.append(SamplingParams(temperature=0, max_tokens=12))
    options = {"max_model_len": 512, "kv_cache_memory": "256MiB", "depth": request.param}
    with LLM(str(real_model_folder), **options) as llm:
        message = [{"role": "user", "content": QUESTION}]
        outputs = llm.chat([message] * len(params), params, use_tqdm=False)
    choices = [output.outputs[0] for output in outputs]
    assert [choice.finish_reason for choice in choices] == ["stop"] * len(held) + ["length"]
    return dict(zip([*held, "free"], [choice.text for choice in choices], strict=True))


def test_schemas(texts: dict[str, str]) -> None:
    person = json.loads(texts["person"])
    assert set(person) == {"name", "age", "mail"}
    assert 0 <= person["age"] <= 130
    assert person["mail"] is None or re.fullmatch(r"[a-z]{1,8}@[a-z]{1,8}\.org", person["mail"])
    path = json.loads(texts["nested"])["path"]
    assert 2 <= len(path) <= 3
    assert all(isinstance(point["x"], int | float) for point in path)
    either = json.loads(texts["either"])
    if isinstance(either, dict):
        assert either == {"kind": "dog", "good": either["good"]}
    else:
        assert set(either) <= {"a", "b", 3, None}


def test_other_forms(texts: dict[str, str]) -> None:
    assert re.fullmatch(FORMS["regex"]["regex"], texts["regex"])
    assert texts["choice"] in FORMS["choice"]["choice"]
    assert re.fullmatch(r"\d{1,3}( \+ \d{1,3})?", texts["grammar"])
    assert not texts["free"].startswith("{")
