"""The exercise's proposer, as docs/speculative-decoding.md prints it, on a model with weights."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mini_infer import LLM, SamplingParams
from mini_infer.core.outputs import RequestOutput

CHAPTER = Path(__file__).parents[1] / "docs" / "speculative-decoding.md"
PROMPTS = ["Once upon a time", "The other one", "Once upon a time", "Once upon a"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """The last Python block of the chapter, as a module with this name."""
    source = re.findall(r"^```python\n(.*?)^```$", CHAPTER.read_text(), re.MULTILINE | re.DOTALL)[
        -1
    ]
    found = ModuleType("exercise")
    exec(compile(source, "exercise.py", "exec"), found.__dict__)
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found.__name__


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_proposes_what_others_were_told_and_changes_nothing(
    module: str, tiny_folder: Path, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=7)

    def generate(**options: object) -> list[RequestOutput]:
        with LLM(str(tiny_folder), dtype="float32", max_model_len=64, **options) as llm:
            return [llm.generate(text, params, use_tqdm=False)[0] for text in PROMPTS]

    plain = generate()
    drafted = generate(speculative_config={"method": f"{module}:SharedTrigrams", "adaptive": False})
    assert [out.outputs for out in drafted] == [out.outputs for out in plain]
    drafts = drafted[2].metrics.drafts  # of a prompt that was answered before
    assert drafts is not None
    assert drafts.acceptance_rate is not None
    assert drafts.acceptance_rate > 0.5
    assert plain[2].metrics.drafts is None
