"""GGUF metadata -> the ``config.json`` that Hugging Face would have written for the model."""

import math
from typing import Any

import torch

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.core.model_config import RopeConfig
from mini_infer.modeling.gguf_file import GGUFFile
from mini_infer.modeling.rotary import llama3_frequencies, plain_frequencies

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def gguf_architecture(file: GGUFFile) -> str:
    """The Hugging Face class name of the file's architecture.

    Raises:
        UnsupportedModelError: another architecture, a mixture of experts under one of the names,
            or one file of several.
    """
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported, "
            f"only {', '.join(ARCHITECTURES)}"
        )
    if file.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: a mixture of experts is not supported")
    if (num_files := file.get("split.count", 1)) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {num_files} files that make up a model: join them first "
            "(llama.cpp's gguf-split --merge)"
        )
    return ARCHITECTURES[architecture]


def uniform(file: GGUFFile, key: str, default: int | None = None) -> int:
    """An integer that GGUF may give once or per layer; layers that differ are not supported."""
    value = file.get(key, default)
    if value is None:
        value = file.require(key)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise UnsupportedModelError(f"{file.path}: {key} differs between layers: {value}")
    return int(values.pop())


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The dictionary of a ``config.json`` that transformers loads too.

    Raises:
        UnsupportedModelError: an architecture, or a variant of one, that is not supported, or
            metadata that makes no sense.
    """
    try:
        return _config(file)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UnsupportedModelError(f"{file.path}: malformed GGUF metadata: {error}") from None


def _config(file: GGUFFile) -> dict[str, Any]:
    hf_class = gguf_architecture(file)
    arch = file.architecture
    hidden_size = uniform(file, f"{arch}.embedding_length")
    num_heads = uniform(file, f"{arch}.attention.head_count")
    head_dim = uniform(file, f"{arch}.attention.key_length", hidden_size // num_heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if uniform(file, key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {key} is {file.get(key)}, not the head size {head_dim}"
            )
    if head_dim % 2:
        raise UnsupportedModelError(
            f"{file.path}: rotary embedding needs an even head size, not {head_dim}"
        )
    if "token_embd.weight" not in file.tensors:
        raise UnsupportedModelError(f"{file.path} holds no token embedding (token_embd.weight)")
    max_position_embeddings = uniform(file, f"{arch}.context_length")
    window = uniform(file, f"{arch}.attention.sliding_window", 0)
    if 0 < window < max_position_embeddings:
        raise UnsupportedModelError(
            f"{file.path}: a sliding window of {window} tokens is not supported in a GGUF, which "
            "does not say which layers slide: use the model's folder in Hugging Face format"
        )
    rope = _rope(file, head_dim, max_position_embeddings)
    theta = rope.pop("rope_theta")
    config: dict[str, Any] = {
        "architectures": [hf_class],
        "model_type": arch,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": uniform(file, f"{arch}.feed_forward_length"),
        "num_hidden_layers": uniform(file, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": uniform(file, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": float(file.require(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, **rope},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    if arch != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    else:
        config["use_sliding_window"] = False
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = file.get(f"tokenizer.ggml.{name}_token_id")
    if (pad := file.get("tokenizer.ggml.padding_token_id")) is not None:
        config["pad_token_id"] = pad
    return config


def _rope(file: GGUFFile, head_dim: int, max_position_embeddings: int) -> dict[str, Any]:
    """``rope_parameters``: base and context extension."""
    arch = file.architecture
    theta = float(file.get(f"{arch}.rope.freq_base", 10000.0))
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, theta, head_dim, max_position_embeddings)
    kind = file.get(f"{arch}.rope.scaling.type", "none")
    factor = float(file.get(f"{arch}.rope.scaling.factor", 0.0))
    if legacy := float(file.get(f"{arch}.rope.scale_linear", 0.0)):
        kind, factor = "linear", legacy
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "linear":
        return rope
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{file.path}: rotary scaling {kind!r} is not supported, only none, linear and yarn"
        )
    original = file.get(f"{arch}.rope.scaling.original_context_length", max_position_embeddings)
    rope["original_max_position_embeddings"] = int(original)
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if (value := file.get(f"{arch}.rope.scaling.{theirs}")) is not None:
            rope[ours] = float(value)
    if (multiplier := file.get(f"{arch}.rope.scaling.attn_factor")) is not None:
        # GGUF's is a multiplier of YaRN's own temperature, Hugging Face's the whole of it.
        rope["attention_factor"] = float(multiplier) * (0.1 * math.log(factor) + 1.0)
    return rope


def _llama3_rope(
    file: GGUFFile, theta: float, head_dim: int, max_position_embeddings: int
) -> dict[str, Any]:
    """Recovers the rule's parameters from its table: GGUF keeps only ``rope_freqs.weight``.

    The largest divisor is the factor; the original context is the one of a few powers of two that
    gives the same table. Only the frequency limits 1 and 4, which all Llama 3 models have, are
    recognised.
    """
    table = torch.from_numpy(file.dequantize("rope_freqs.weight").reshape(-1))
    if bool((table == 1.0).all()):
        return {"rope_type": "default", "rope_theta": theta}
    rule = RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=float(table.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    frequencies = plain_frequencies(theta, head_dim)
    for original in (8192, 4096, 16384, 2048, 32768, 1024, max_position_embeddings):
        divisors = frequencies / llama3_frequencies(rule, frequencies, original)
        if divisors.shape == table.shape and torch.allclose(divisors, table, rtol=1e-4):
            return {
                "rope_type": rule.rope_type,
                "rope_theta": theta,
                "factor": rule.factor,
                "low_freq_factor": rule.low_freq_factor,
                "high_freq_factor": rule.high_freq_factor,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(
        f"{file.path}: the table rope_freqs.weight follows no known rotary scaling"
    )
