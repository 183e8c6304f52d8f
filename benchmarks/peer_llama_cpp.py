"""llama.cpp as a peer: the same weights as an F16 GGUF, measured by its own batched benchmark."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.core.model_config import ModelConfig

BINARY = "llama-batched-bench"
ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}


def find_binary(given: str | None) -> str | None:
    """The program's path, or None where llama.cpp is not installed."""
    return shutil.which(given or BINARY)


def write_f16_gguf(folder: Path, config: ModelConfig, path: Path) -> None:
    """Writes a Hugging Face folder's weights as a GGUF: matrices in F16, vectors in F32.

    It has no tokenizer, because the benchmark sends token ids.

    Raises:
        UnsupportedModelError: another architecture, or a rotary scaling that GGUF keeps elsewhere.
    """
    if config.architecture not in ARCHITECTURES or config.rope.rope_type != "default":
        raise UnsupportedModelError(
            f"the comparison with llama.cpp converts {', '.join(ARCHITECTURES)} without rotary "
            f"scaling, not {config.architecture} with {config.rope.rope_type!r}"
        )
    arch = ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    for name, tensor in _tensors(folder):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise UnsupportedModelError(f"tensor {name!r} has no name in GGUF")
        if arch is gguf.MODEL_ARCH.LLAMA and name.split(".")[-2] in ("q_proj", "k_proj"):
            num_heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            tensor = _interleave_rotary_halves(tensor, num_heads)
        writer.add_tensor(target, tensor.astype(np.float32 if tensor.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def batched_bench(
    binary: str,
    model: Path,
    batches: list[int],
    num_prompt_tokens: int,
    num_output_tokens: int,
    threads: int,
) -> list[dict[str, float]]:
    """One line for each batch size: seconds of prefill ``t_pp``, decode ``t_tg``, together ``t``.

    Raises:
        UnsupportedModelError: the program failed, or printed something else.
    """
    command = [binary, "-m", str(model), "-t", str(threads), "-tb", str(threads)]
    command += ["-c", str(max(batches) * (num_prompt_tokens + num_output_tokens))]
    command += ["-npp", str(num_prompt_tokens), "-ntg", str(num_output_tokens)]
    command += ["-npl", ",".join(map(str, batches)), "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or [line["pl"] for line in lines] != batches:
        tail = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise UnsupportedModelError(f"{binary} failed: {' '.join(tail) or done.returncode}")
    return lines


def _tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                tensor: torch.Tensor = file.get_tensor(name)
                yield name, tensor.float().numpy()


def _interleave_rotary_halves(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours of a llama head, Hugging Face its first and second half."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
