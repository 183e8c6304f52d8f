"""Which architectures exist, and what a user is told about the others."""

import subprocess
import sys

import pytest

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.registry import ARCHITECTURES, check_supported, model_class


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_every_registered_architecture_imports(architecture: str) -> None:
    check_supported(architecture)
    assert issubclass(model_class(architecture), CausalLM)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "", "llamaforcausallm"])
def test_an_unknown_architecture_is_told_what_is_supported(name: str) -> None:
    for look_up in (check_supported, model_class):
        with pytest.raises(UnsupportedModelError) as error:
            look_up(name)
        assert repr(name) in str(error.value)
        for supported in ARCHITECTURES:
            assert supported in str(error.value)


def test_an_architecture_outside_the_package_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "mini_infer.modeling.models.qwen3:Qwen3ForCausalLM"
    monkeypatch.setitem(ARCHITECTURES, "MyForCausalLM", path)
    assert model_class("MyForCausalLM").__name__ == "Qwen3ForCausalLM"


def test_checking_a_name_does_not_import_torch() -> None:
    code = (
        "import sys; from mini_infer.modeling.registry import check_supported;"
        "check_supported('LlamaForCausalLM'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
