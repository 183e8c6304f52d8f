"""Rotary position embedding and its context extensions, as one precomputed table.

A row of the table depends on nothing but its position, so a token's key depends on nothing but the
tokens before it. Chunked prefill, prefix caching and preemption rest on that.
"""

import math

import torch
from torch import Tensor, nn

from mini_infer.core.model_config import ModelConfig, RopeConfig
from mini_infer.kernels.metadata import Rope


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position (arXiv 2104.09864)."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        # Computed on the CPU whatever the device: every device gets the same bits, and shapes alone
        # (torch's meta device) do not cost the import of a compiler.
        with torch.device("cpu"):
            table = rotary_table(config, max_model_len)
        table = table.to(torch.get_default_device())
        self.register_buffer("table", table, persistent=False)  # [max_model_len, head_dim]

    def forward(self, positions: Tensor) -> Rope:
        """What a step's layers need to rotate tokens at ``positions [T]``."""
        return Rope(self.get_buffer("table"), positions)


def rotary_table(config: ModelConfig, max_model_len: int) -> Tensor:
    """``[max_model_len, head_dim]`` float32: per position the cosines, then the sines."""
    rope, positions = config.rope, torch.arange(max_model_len, dtype=torch.float32)
    frequencies = plain_frequencies(rope.theta, config.head_dim)  # [head_dim / 2]
    scale = 1.0
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "dynamic":
        frequencies = _dynamic(rope, config.head_dim, config.max_position_embeddings, positions)
    elif rope.rope_type == "llama3":
        frequencies = llama3_frequencies(rope, frequencies, _original_length(config))
    elif rope.rope_type == "yarn":
        frequencies = _yarn(rope, frequencies, config.head_dim, _original_length(config))
        scale = _yarn_attention_factor(rope)
    angles = positions[:, None] * frequencies  # [max_model_len, head_dim / 2]
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def _original_length(config: ModelConfig) -> int:
    return config.rope.original_max_position_embeddings or config.max_position_embeddings


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [head_dim / 2]


def plain_frequencies(theta: float, head_dim: int) -> Tensor:
    """Radians per position ``[head_dim / 2]``, without any extension."""
    return 1.0 / theta ** _exponents(head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, trained_length: int, positions: Tensor) -> Tensor:
    """NTK-aware base that grows with the sequence: frequencies ``[max_model_len, head_dim / 2]``.

    Position p gets the base of a sequence that ends at p. That is what Hugging Face's decoding
    computes when it appends p, and it makes a key independent of what comes later. Hugging Face
    rotates a prompt that is longer than the trained length with the base of the prompt's end
    instead, so there, and only there, a chunk's result differs from its.
    """
    length = (positions + 1).clamp(min=trained_length)
    growth = rope.factor * length / trained_length - (rope.factor - 1)
    theta = rope.theta * growth ** (head_dim / (head_dim - 2))  # [max_model_len]
    return 1.0 / theta[:, None] ** _exponents(head_dim)


def llama3_frequencies(rope: RopeConfig, frequencies: Tensor, original_length: int) -> Tensor:
    """Divides low frequencies by ``factor``, keeps high ones, and blends those between."""
    turns = original_length * frequencies / (2 * math.pi)  # full turns over the trained length
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int, original_length: int) -> Tensor:
    """Keeps dimensions that turn often, interpolates those that turn seldom (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes this many turns over the trained length."""
        wavelength = original_length / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    keep = 1 - ((index - low) / width).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """What scales cosines and sines, and so the attention's temperature (section 3.4 there)."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
