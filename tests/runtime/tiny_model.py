"""Engines over the tiny random model, without any file."""

from pathlib import Path

from mini_infer.modeling.model_files import ModelFiles
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.local_executor import LocalExecutor
from tests.runtime.fake_executor import make_config


def tiny_engine(**options: object) -> LLMEngine:
    """The real model runner with seeded random weights, in float32."""
    config = make_config(**options)
    files = ModelFiles(Path("unused"), Path("unused"))
    return LLMEngine(config, LocalExecutor(config, files), ByteTokenizer())
