"""Paged attention: which kernel takes which rows."""

import torch
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton.launch import num_sms, shared_memory
from mini_infer.kernels.triton.split_attention import attend_short, plan_splits
from mini_infer.kernels.triton.tiled_attention import attend_long
from mini_infer.kernels.triton.tiles import Tiles

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


def short_rows(
    num_heads: int, num_kv_heads: int, head_bytes: int, most_rows: int, device: torch.device
) -> list[tuple[int, int]]:
    """Queries of the longest of some short rows, and how many rows, up to ``most_rows``: a pair for
    each kernel that splits such rows. ``head_bytes`` is the size of one key."""
    sms, memory, group = num_sms(device), shared_memory(device), num_heads // num_kv_heads
    pairs: dict[Tiles, tuple[int, int]] = {}
    for queries in range(1, SHORT_QUERY + 1):
        for rows in range(1, most_rows + 1):
            plan = plan_splits(rows, num_kv_heads, queries * group, 1, head_bytes, sms, memory)
            pairs.setdefault(plan.tiles, (queries, rows))
    return list(pairs.values())
