"""Small random models on a GPU, and requests of every kind."""

import json
from pathlib import Path
from typing import Any

import torch

from mini_infer import LLM, SamplingParams

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def write_config(folder: Path, architecture: str) -> Path:
    """A folder with nothing but the configuration of a small model."""
    config = SHAPE | {"architectures": [architecture], "model_type": ARCHITECTURES[architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"load_format": "dummy", "dtype": "float32", "device": "cuda"}
    limits = {"max_num_seqs": 16, "num_kv_blocks": 600}
    return LLM(str(folder), **(defaults | limits | options))


def prompts() -> list[list[int]]:
    """Mixed lengths, from a single token to several chunks, two of them with a common head."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 15, 16, 17, 40, 100, 130, 200, 3, 64]
    made = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in lengths]
    return [*made, [*made[7][:96], 5, 6, 7]]


def mixed_params() -> list[SamplingParams]:
    """Every kind of row: the graph's sampler and the edits after it."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.6, "seed": 1},
        {"temperature": 1.0, "top_k": 20, "seed": 2},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "min_p": 0.05, "seed": 4},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 5},
        {"temperature": 0.0, "logit_bias": {7: 3.0}},
        {"temperature": 0.0, "logprobs": 4},
        {"temperature": 0.9, "allowed_token_ids": list(range(50)), "seed": 6},
        {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": [3]},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.7, "seed": 7},
    ]
    return [
        SamplingParams(max_tokens=10 + index, ignore_eos=True, **kind)
        for index, kind in enumerate(kinds)
    ]


def generate_all(folder: Path, **options: Any) -> list[list[int]]:
    """Tokens of all prompts, twice in one batch: greedily, and with every kind of parameters."""
    params = [GREEDY] * len(prompts()) + mixed_params()
    with open_llm(folder, **options) as llm:
        outputs = llm.generate(prompts() * 2, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
