"""The operations that a model calls. Each name is the implementation in use on this machine.

The torch reference is the oracle of every faster implementation, and is what runs where there is
none.
"""

from mini_infer.kernels.reference import (
    add_rms_norm,
    apply_rotary,
    paged_attention,
    rms_norm,
    silu_and_mul,
    write_kv,
)

__all__ = [
    "add_rms_norm",
    "apply_rotary",
    "paged_attention",
    "rms_norm",
    "silu_and_mul",
    "write_kv",
]
