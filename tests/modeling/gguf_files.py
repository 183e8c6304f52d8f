"""Small GGUF files for the tests: tiny Hugging Face models, and a vocabulary that shows splits."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<think>"
MERGES = ["1 2", "12 3", "123 4", "Ċ Ċ", "h e", "Ġ h", "Ġ he", "Ã ©", "Ġ Ġ", "! !"]
BOS, EOS, PAD = 1, 2, 0
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
TOKENS += [USER_DEFINED]
TOKEN_TYPES = [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS) - 1) + [4]
VOCAB_SIZE = len(TOKENS) + 2  # two rows of padding


def tokenizer_metadata(pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*TOKENS, f"[PAD{len(TOKENS)}]", f"[PAD{len(TOKENS) + 1}]"],
        "tokenizer.ggml.token_type": [*TOKEN_TYPES, 5, 5],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata.update({f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    return metadata


def write_gguf(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> Path:
    """A file of these keys (None: left out) and tensors; a tuple holds raw blocks and a type."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 12}),
}


def tiny_model(name: str, **changes: Any) -> Any:
    """A seeded random Hugging Face model: grouped-query attention, two layers."""
    family, settings = MODELS[name]
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    config = getattr(transformers, f"{family}Config")(**shape | settings | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # Hugging Face starts norms at 1 and biases at 0: make each count.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(10)
    return model


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def model_tensors(model: Any) -> dict[str, np.ndarray]:
    """The model's tensors as llama.cpp's converter names and orders them."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        base, _, kind = name.rpartition(".")
        prefix = ""
        if base.startswith("model.layers."):
            _, _, layer, base = base.split(".", 3)
            prefix = f"blk.{layer}."
        part = base.rpartition(".")[2]
        if config.model_type == "llama" and part in heads:
            # [heads, 2 halves, head_dim / 2, ...]: the halves end up interleaved.
            split = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = split.swapaxes(1, 2).reshape(array.shape)
        tensors[f"{prefix}{GGUF_NAMES[base]}.{kind}"] = array
    return tensors


def model_metadata(model: Any) -> dict[str, Any]:
    config = model.config
    arch = config.model_type
    metadata = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if arch == "qwen3":
        metadata[f"{arch}.attention.key_length"] = config.head_dim
        metadata[f"{arch}.attention.value_length"] = config.head_dim
    return metadata


def write_model(path: Path, model: Any, pre: str | None = "smollm", **changes: Any) -> Path:
    """A complete GGUF of a tiny model; ``changes`` are metadata keys with ``__`` for a dot."""
    metadata = model_metadata(model) | tokenizer_metadata(pre)
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return write_gguf(path, model.config.model_type, metadata, model_tensors(model))
