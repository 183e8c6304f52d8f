"""Every attention backend that is present, over the same steps, against float64."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mini_infer.core.errors import InvalidConfigError
from mini_infer.kernels import flash_attention, reference
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton import attention as triton_attention
from tests.kernels.paged_batches import metadata

DEVICE = torch.device("cuda")
BACKENDS = {
    "torch": reference.paged_attention,
    "triton": triton_attention.paged_attention,
    "flash_attn": flash_attention.paged_attention,
}
DTYPE = torch.bfloat16
TOLERANCE = 8e-3
SHAPES = [
    ((28, 4, 128), 16, None),
    ((28, 4, 128), 256, 100),
    ((16, 8, 128), 256, None),
    ((9, 3, 64), 16, 100),
]
"""Heads, key-value heads, head size; block size; window. Each costs a compilation, so they are few:
``test_triton_attention`` has more."""
STEPS = {
    "one long decode": ([1], [9000]),
    "decodes": ([1] * 5, [3, 700, 64, 65, 5000]),
    "drafts": ([5, 5, 5], [1000, 2000, 8]),
    "chunks beside decodes": ([300, 1, 4, 77], [300, 3000, 129, 777]),
}


def on_gpu(meta: AttentionMetadata) -> AttentionMetadata:
    names = ("cu_seqlens_q", "seqlens_k", "block_table", "slot_mapping")
    return replace(meta, **{name: getattr(meta, name).to(DEVICE) for name in names})


def exact(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, window: int | None
) -> Tensor:
    """Row by row in float64."""
    group, rows, begin = q.shape[1] // k_cache.shape[2], [], 0
    for row, (length, context) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
        blocks = meta.block_table[row, : -(-context // k_cache.shape[1])].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:context].double().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + length].double(), k)
        age = torch.arange(context - length, context, device=DEVICE)[:, None]
        age = age - torch.arange(context, device=DEVICE)
        hidden = (age < 0) | (age >= (window or context))
        weights = (scores * q.shape[2] ** -0.5).masked_fill(hidden, -math.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, v))
        begin += length
    return torch.cat(rows)


@functools.cache
def obstacle(backend: str, block_size: int, head_dim: int) -> str:
    """Why a backend cannot run such a model here; nothing if it can."""
    if backend == "flash_attn":
        capability = torch.cuda.get_device_capability()
        try:
            flash_attention.check_available(capability, block_size, head_dim, "bfloat16")
        except InvalidConfigError as error:
            return str(error)
    return ""


PRESENT = [backend for backend in BACKENDS if not obstacle(backend, 256, 128)]


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("heads", "block_size", "window"), SHAPES)
@pytest.mark.parametrize("backend", PRESENT)
def test_every_backend_that_is_present(
    backend: str,
    heads: tuple[int, int, int],
    block_size: int,
    window: int | None,
    lengths: tuple[list[int], list[int]],
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    if reason := obstacle(backend, block_size, head_dim):
        pytest.skip(reason)
    query_lens, context_lens = lengths
    generator = torch.Generator()
    generator.seed()  # fresh inputs in every run
    meta = on_gpu(metadata(query_lens, context_lens, block_size, generator))
    num_blocks = sum(-(-context // block_size) for context in context_lens)
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)  # as allocate_kv_cache has it
    k_cache, v_cache = torch.randn(shape, device=DEVICE, dtype=DTYPE).transpose(2, 3).unbind(1)
    q = torch.randn(sum(query_lens), num_heads, head_dim, device=DEVICE, dtype=DTYPE)
    torch.full((64 << 20,), math.nan, device=DEVICE)  # what an unwritten element would show
    out = BACKENDS[backend](q, k_cache, v_cache, meta, head_dim**-0.5, window)
    expected = exact(q, k_cache, v_cache, meta, window)
    assert (out.double() - expected).norm() / expected.norm() < TOLERANCE
