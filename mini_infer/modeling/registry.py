"""Architecture name (``architectures[0]`` of a config.json) -> class, imported when asked for.

Importing this module does not import torch, so that options can be checked before anything loads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mini_infer.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from mini_infer.modeling.causal_lm import CausalLM

MODELS = "mini_infer.modeling.models"
ARCHITECTURES = {
    "LlamaForCausalLM": f"{MODELS}.llama:LlamaForCausalLM",
    "MistralForCausalLM": f"{MODELS}.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": f"{MODELS}.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": f"{MODELS}.qwen3:Qwen3ForCausalLM",
}


def check_supported(architecture: str) -> None:
    """Raises ``UnsupportedModelError``, which lists what is supported, for any other name."""
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported are: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements an architecture.

    Raises:
        UnsupportedModelError: mini-infer does not implement it.
    """
    check_supported(architecture)
    module, _, name = ARCHITECTURES[architecture].partition(":")
    implementation: type[CausalLM] = getattr(import_module(module), name)
    return implementation
