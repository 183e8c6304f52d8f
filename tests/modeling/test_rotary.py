"""The rotary table against Hugging Face's frequencies, for every context extension."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels import reference
from mini_infer.modeling.rotary import RotaryEmbedding, rotary_table

LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default, large base": {"rope_type": "default", "rope_theta": 1000000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA_31,
    "llama3 of 3.2": {**LLAMA_31, "factor": 32.0},
    "yarn": QWEN_YARN,
    "yarn, own betas": {**QWEN_YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, range not truncated": {**QWEN_YARN, "truncate": False},
    "yarn, attention factor": {**QWEN_YARN, "attention_factor": 1.25},
    "yarn, mscale": {**QWEN_YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn, nothing to blend": {
        **QWEN_YARN,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 5.5,
        "rope_theta": 10000.0,
    },
    "yarn, factor 1": {**QWEN_YARN, "factor": 1.0},
}


def configs(rope: dict[str, Any], length: int = 32768) -> tuple[LlamaConfig, ModelConfig]:
    theirs = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=1,
        max_position_embeddings=length,
        rope_parameters=dict(rope),
    )
    ours = ModelConfig.from_dict({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    return theirs, ours


@pytest.mark.parametrize("case", CASES)
def test_table_matches_hugging_face(case: str) -> None:
    theirs, ours = configs(CASES[case])
    positions = torch.tensor([0, 1, 2, 17, 500, 1023, 2047])
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    sin[..., :32] *= -1  # ours is negated where a half is subtracted
    rope = RotaryEmbedding(ours, 2048)(positions).cos_sin(torch.float32)
    for table, expected in zip(rope, (cos, sin), strict=True):
        torch.testing.assert_close(table, expected.transpose(0, 1), atol=3e-4, rtol=0)


@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
def test_plain_table_is_hugging_faces_to_the_bit(theta: float) -> None:
    theirs, ours = configs({"rope_type": "default", "rope_theta": theta})
    positions = torch.arange(32768)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    table = rotary_table(ours, 32768)
    assert torch.equal(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), -1))


@pytest.mark.parametrize("position", [0, 10, 62, 63, 64, 65, 100, 255])
def test_dynamic_row_is_that_of_a_sequence_that_ends_there(position: int) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    theirs, ours = configs(rope, length=64)
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
    expected = torch.cat(((position * frequencies).cos(), (position * frequencies).sin()))
    torch.testing.assert_close(rotary_table(ours, 256)[position], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", [*CASES, "dynamic"])
def test_a_row_does_not_depend_on_the_table_length(case: str) -> None:
    rope = CASES.get(case, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0})
    _, ours = configs(rope, length=64)
    torch.testing.assert_close(rotary_table(ours, 400)[:100], rotary_table(ours, 100))


def test_scores_depend_on_distance_only() -> None:
    _, ours = configs(CASES["default"])
    rotary = RotaryEmbedding(ours, 256)
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(query: int, key: int) -> float:
        q_at, k_at = (
            reference.apply_rotary(x, *rotary(torch.tensor([position])).cos_sin(x.dtype))
            for x, position in ((q, query), (k, key))
        )
        return float((q_at * k_at).sum())

    assert score(13, 5) == pytest.approx(score(208, 200), abs=1e-4)
    assert score(13, 5) != pytest.approx(score(13, 6), abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lookup_comes_in_the_asked_dtype_from_a_float32_table(dtype: torch.dtype) -> None:
    _, ours = configs(CASES["yarn"])
    rotary = RotaryEmbedding(ours, 64)
    cos, sin = rotary(torch.tensor([3, 63, 3])).cos_sin(dtype)
    assert cos.shape == sin.shape == (3, 1, 64)
    assert cos.dtype == sin.dtype == dtype
    assert rotary.get_buffer("table").dtype == torch.float32
    assert torch.equal(cos[0], cos[2])
