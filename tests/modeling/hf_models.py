"""Tiny random Hugging Face models of every supported kind, and ours with the same weights."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.safetensors_source import SafetensorsSource
from mini_infer.modeling.weights import build_model

VOCAB = 151
TRAINED_LENGTH = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED_LENGTH,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "eos_token_id": None,
    "bos_token_id": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 12}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 6}),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", WINDOW),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"head_dim": 10, "attention_bias": True}),
    "qwen3-window": ("Qwen3", {"head_dim": 16, **WINDOW}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN}),
}


def hf_model(case: str) -> transformers.PreTrainedModel:
    """A float32 model whose every parameter, norms and biases too, is random and matters."""
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.15)
            parameter.normal_(center, spread, generator=generator)
    return model


def read_config(folder: Path) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))


def load(folder: Path, **options: Any) -> CausalLM:
    return build_model(read_config(folder), SafetensorsSource(folder), torch.float32, **options)


@cache
def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
