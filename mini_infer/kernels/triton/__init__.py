"""Kernels in Triton, one file per family; imported only where a GPU runs them.

Each function has the arguments of its namesake in ``mini_infer.kernels.reference``;
``rotary_and_write_kv`` is three of those in one launch.
"""

from mini_infer.kernels.triton.activation import silu_and_mul
from mini_infer.kernels.triton.attention import paged_attention
from mini_infer.kernels.triton.norm import rms_norm
from mini_infer.kernels.triton.rotary import apply_rotary, rotary_and_write_kv, write_kv

__all__ = [
    "apply_rotary",
    "paged_attention",
    "rms_norm",
    "rotary_and_write_kv",
    "silu_and_mul",
    "write_kv",
]
