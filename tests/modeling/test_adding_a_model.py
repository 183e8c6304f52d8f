"""The walk-through of docs/adding-a-model.md, run as it is printed."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mini_infer.modeling.registry import ARCHITECTURES
from tests.modeling import hf_models
from tests.modeling.driver import PagedDriver
from tests.modeling.hf_models import hf_model, load, prompt

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


@pytest.mark.parametrize("chunk_size", [3, 1024])
def test_the_walk_through_matches_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = ModuleType("walk_through")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "walk_through", module)
    monkeypatch.setitem(ARCHITECTURES, "Olmo2ForCausalLM", "walk_through:Olmo2ForCausalLM")
    (case,) = re.findall(r'^    "olmo2": \("(\w+)", \{\}\),$', page, re.MULTILINE)
    monkeypatch.setitem(hf_models.CASES, "olmo2", (case, {}))

    reference = hf_model("olmo2")
    reference.save_pretrained(tmp_path)
    tokens = prompt(21)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    logits = PagedDriver(load(tmp_path)).prefill("a", tokens, chunk_size)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
