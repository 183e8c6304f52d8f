"""Queries that are rotated without keys beside them: those of attention over others' keys."""

from torch import Tensor

from mini_infer.kernels import ops
from mini_infer.kernels.metadata import Rope
from mini_infer.kernels.reference import Norm, apply_rotary


def rotate_queries(q: Tensor, rope: Rope, k_cache: Tensor, norm: Norm | None = None) -> Tensor:
    """``q [T, H, D]``, its heads normed if there is a norm, then rotated (arXiv 2104.09864).

    ``k_cache`` is the cache of the keys that will be attended to; nothing is written to it.
    """
    if q.is_cuda and (kernels := ops.gpu_kernels()):
        # The kernel that stores keys and values too, told that there are none.
        none = k_cache[:, :, :0]
        qk_norm = None if norm is None else (norm[0], *norm)
        result: Tensor = kernels.rotary_and_write_kv(q, rope, none, none, rope.positions, qk_norm)
        return result
    if norm is not None:
        q = ops.rms_norm(q, *norm)
    return apply_rotary(q, *rope.cos_sin(q.dtype))
