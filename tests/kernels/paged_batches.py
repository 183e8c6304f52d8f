"""Random steps over a paged cache: any chunk lengths, any contexts, blocks in scrambled order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata

POISON = 3e4
"""What slots hold that no token wrote: large, so that the smallest weight on one shows; finite, as
a cache of zeros or of old tokens always is."""


@dataclass(frozen=True)
class Shape:
    """Heads and blocks of one layer."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    interleaved: bool = True
    """Keys and values are two halves of one tensor, as ``allocate_kv_cache`` makes them."""


@dataclass(frozen=True)
class PagedBatch:
    """Arguments of one ``paged_attention`` call."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMetadata
    scale: float

    def in_dtype(self, dtype: torch.dtype) -> "PagedBatch":
        """Float64 makes the reference an oracle beyond rounding; caches lose their interleaving."""
        caches = (cache.to(dtype) for cache in (self.k_cache, self.v_cache))
        return PagedBatch(self.q.to(dtype), *caches, self.meta, self.scale)


def metadata(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    generator: torch.Generator,
) -> AttentionMetadata:
    """Rows whose blocks are drawn without replacement; the table's padding names foreign blocks."""
    counts = [-(-context // block_size) for context in context_lens]
    order = torch.randperm(sum(counts), generator=generator).int()
    table = order[0].repeat(len(counts), max(counts))
    for row, blocks in enumerate(order.split(counts)):
        table[row, : counts[row]] = blocks
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (query, context) in enumerate(zip(query_lens, context_lens, strict=True))
        for position in range(context - query, context)
    ]
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seqlens_k=torch.tensor(context_lens).int(),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(query_lens),
        max_seqlen_k=max(context_lens),
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
    )


def empty_caches(
    num_blocks: int, shape: Shape, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    heads = shape.num_kv_heads
    size = (num_blocks, shape.block_size, 2 * heads, shape.head_dim)
    pair = torch.full(size, POISON, dtype=dtype)
    k_cache, v_cache = pair[:, :, :heads], pair[:, :, heads:]
    return (k_cache, v_cache) if shape.interleaved else (k_cache.clone(), v_cache.clone())


def paged_batch(
    query_lens: Sequence[int], context_lens: Sequence[int], shape: Shape, seed: int = 0
) -> PagedBatch:
    """Every position of every context is written; every other slot is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    meta = metadata(query_lens, context_lens, shape.block_size, generator)
    num_blocks = sum(-(-context // shape.block_size) for context in context_lens)
    k_cache, v_cache = empty_caches(num_blocks, shape)
    for row, context in enumerate(context_lens):
        positions = torch.arange(context)
        blocks = meta.block_table[row].long()[positions // shape.block_size]
        for cache in (k_cache, v_cache):
            cache[blocks, positions % shape.block_size] = torch.randn(
                context, shape.num_kv_heads, shape.head_dim, generator=generator
            )
    q = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, generator=generator)
    return PagedBatch(q, k_cache, v_cache, meta, shape.head_dim**-0.5)
