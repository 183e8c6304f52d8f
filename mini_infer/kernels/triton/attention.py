"""Paged attention: which kernel takes which rows."""

import torch
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton.split_attention import attend_short
from mini_infer.kernels.triton.tiled_attention import attend_long

SHORT_QUERY = 9
"""Queries of a row up to which it is split over its context: a token, or that and eight drafts."""


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """See ``reference.paged_attention``: ``q [T, H, D]`` -> ``[T, H, D]``, contiguous.

    Rows of up to ``SHORT_QUERY`` queries are split over their contexts, longer ones tiled; the
    kernels of each leave the other's rows alone. The two caches must be laid out alike.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    short = max((length for length in meta.query_lens if length <= SHORT_QUERY), default=0)
    window = sliding_window or 0
    if short:
        attend_short(q, k_cache, v_cache, out, meta, scale, window, short)
    if meta.max_query_len > short:
        attend_long(q, k_cache, v_cache, out, meta, scale, window, short)
    return out
