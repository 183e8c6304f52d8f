"""mini-infer: an LLM inference engine to read in an afternoon and serve real models with."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "SamplingParams", "StructuredOutputsParams", "__version__"]

if TYPE_CHECKING:
    from mini_infer.core.sampling_params import SamplingParams
    from mini_infer.core.structured_outputs import StructuredOutputsParams
    from mini_infer.runtime.engine import LLMEngine
    from mini_infer.runtime.llm import LLM


def __getattr__(name: str) -> Any:
    """Imports lazily, so that the dry run never pays for torch."""
    homes = {
        "LLM": "mini_infer.runtime.llm",
        "LLMEngine": "mini_infer.runtime.engine",
        "SamplingParams": "mini_infer.core.sampling_params",
        "StructuredOutputsParams": "mini_infer.core.structured_outputs",
    }
    if name not in homes:
        raise AttributeError(f"module 'mini_infer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(homes[name]), name)
