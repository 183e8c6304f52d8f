"""Outputs held to forms on a GPU: the same with every way to run a step, and without a wait."""

import json
import re
from pathlib import Path

import pytest

from mini_infer import SamplingParams, StructuredOutputsParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from tests.gpu.small_engines import mixed_params, open_llm, prompts, write_config
from tests.gpu.test_engine import no_synchronisation

pytest.importorskip("llguidance", reason="without the package llguidance there are no grammars")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b", None]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex="[a-c]{3}(-[0-9]{2}){1,4}"),
    StructuredOutputsParams(choice=["first", "second", "third é"]),
]


def held(index: int, form: StructuredOutputsParams, **fields: object) -> SamplingParams:
    return SamplingParams(  # type: ignore[arg-type]
        temperature=0.9 * (index % 2), seed=index, structured_outputs=form, **fields
    )


def params() -> list[SamplingParams]:
    """Every second request has a form, the others are free rows of every kind."""
    kinds = mixed_params()
    return [
        held(index, FORMS[index // 2 % len(FORMS)], max_tokens=60) if index % 2 else kind
        for index, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), request.param)


def generated(folder: Path, **options: object) -> list[list[int]]:
    with open_llm(folder, **options) as llm:
        outputs = llm.generate(prompts(), params(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return generated(folder, depth=1, enforce_eager=True)


def test_every_output_has_its_form(expected: list[list[int]]) -> None:
    texts = [ByteTokenizer().decode(token_ids) for token_ids in expected]
    for index in range(1, len(texts), 2):
        form = FORMS[index // 2 % len(FORMS)]
        if form.json is not None:
            assert set(json.loads(texts[index])) == {"ok", "kind"}
        elif form.regex is not None:
            assert re.fullmatch(form.regex, texts[index])
        else:
            assert texts[index] in (form.choice or ())


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 2},
        {"depth": 2, "enforce_eager": True},
        {"depth": 1},
        {"depth": 2, "max_num_batched_tokens": 64},
    ],
    ids=str,
)
def test_token_ids_are_the_same_however_a_step_runs(
    folder: Path, expected: list[list[int]], options: dict[str, object]
) -> None:
    assert generated(folder, **options) == expected


def test_a_step_with_masks_never_waits_for_the_device(folder: Path) -> None:
    endless = StructuredOutputsParams(regex="([a-z]{1,5} ){1000}")
    with open_llm(folder, depth=2) as llm:
        for index, prompt in enumerate(prompts()):
            if index % 2:
                llm.engine.add_request(str(index), prompt, held(index, endless, max_tokens=60))
            else:
                free = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
                llm.engine.add_request(str(index), prompt, free)
        for _ in range(8):
            llm.engine.step()
        with no_synchronisation():
            for _ in range(20):
                llm.engine.step()
