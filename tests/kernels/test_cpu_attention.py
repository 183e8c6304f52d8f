"""Batched attention on a CPU against the reference, which takes one row at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.kernels import cpu_attention, ops, reference
from mini_infer.kernels.cpu_attention import MAX_PADDING, ONE_THREAD_BLOCKS, group_rows
from tests.kernels.paged_batches import POISON, PagedBatch, Shape, empty_caches, paged_batch

SHAPES = [
    Shape(),
    Shape(interleaved=False),
    Shape(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16),
    Shape(num_heads=6, num_kv_heads=6, head_dim=16, block_size=1),
    Shape(num_heads=8, num_kv_heads=1, head_dim=32, block_size=7, interleaved=False),
    Shape(num_heads=1, num_kv_heads=1, head_dim=2, block_size=3),
]
STEPS = {
    "one decode": ([1], [9]),
    "first token": ([1], [1]),
    "decodes": ([1, 1, 1, 1], [5, 1, 17, 8]),
    "decodes far apart": ([1, 1, 1, 1], [3, 150, 40, 151]),
    "whole prompt": ([13], [13]),
    "whole prompts of one length": ([6, 6, 6], [6, 6, 6]),
    "later chunk": ([5], [23]),
    "chunks of one length": ([4, 4, 4], [4, 19, 8]),
    "drafts": ([3, 3], [30, 12]),
    "all at once": ([1, 7, 1, 16, 3, 1, 7, 3], [12, 7, 90, 40, 21, 2, 31, 3]),
    "prompt beside decodes": ([1, 40, 1], [33, 40, 6]),
}


def check(batch: PagedBatch, window: int | None = None) -> None:
    """Rounding of float32 is what it may differ by; float64's reference is the truth."""
    q, k_cache, v_cache, meta, scale = (
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.meta,
        batch.scale,
    )
    out = ops.paged_attention(q, k_cache, v_cache, meta, scale, window)
    slow = reference.paged_attention(q, k_cache, v_cache, meta, scale, window)
    assert out.shape == q.shape
    assert out.abs().max() < POISON / 1000, "an unwritten slot was looked at"
    torch.testing.assert_close(out, slow, atol=2e-6, rtol=1e-5)
    exact = exact_attention(batch, window)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)


def exact_attention(batch: PagedBatch, window: int | None) -> torch.Tensor:
    """In float64, one query and one head at a time, straight from the definition."""
    wide = batch.in_dtype(torch.float64)
    block_size, num_kv_heads = wide.k_cache.shape[1:3]
    out = torch.empty_like(wide.q)
    token = 0
    for row, (query_len, context) in enumerate(
        zip(batch.meta.query_lens, batch.meta.context_lens, strict=True)
    ):
        slots = torch.arange(context)
        blocks = batch.meta.block_table[row].long()[slots // block_size]
        keys = wide.k_cache[blocks, slots % block_size]
        values = wide.v_cache[blocks, slots % block_size]
        for position in range(context - query_len, context):
            begin = 0 if window is None else max(0, position - window + 1)
            for head in range(wide.q.shape[1]):
                shared = head * num_kv_heads // wide.q.shape[1]
                scores = keys[begin : position + 1, shared] @ wide.q[token, head] * wide.scale
                out[token, head] = scores.softmax(0) @ values[begin : position + 1, shared]
            token += 1
    return out


@pytest.mark.parametrize("window", [None, 1, 4, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_attention_equals_the_reference(step: str, shape: Shape, window: int | None) -> None:
    check(paged_batch(*STEPS[step], shape), window)


@given(
    rows=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 60)), min_size=1, max_size=7),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 5]),
    head_dim=st.sampled_from([2, 8, 24]),
    block_size=st.sampled_from([1, 2, 5, 16]),
    interleaved=st.booleans(),
    window=st.none() | st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_attention_equals_the_reference_for_any_step(
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    interleaved: bool,
    window: int | None,
    seed: int,
) -> None:
    shape = Shape(kv_heads * group, kv_heads, head_dim, block_size, interleaved)
    query_lens = [query for query, _ in rows]
    batch = paged_batch(query_lens, [query + before for query, before in rows], shape, seed)
    check(batch, window)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_row_computes_the_same_alone_and_in_company(interleaved: bool) -> None:
    """Each row of a step with several groups, against a step of that row only."""
    query_lens, context_lens = STEPS["all at once"]
    shape = Shape(interleaved=interleaved)
    batch = paged_batch(query_lens, context_lens, shape)
    together = ops.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.meta, batch.scale
    ).split(query_lens)
    for row, queries in enumerate(batch.q.split(query_lens)):
        meta = cpu_attention_row(batch, row)
        alone = ops.paged_attention(queries, batch.k_cache, batch.v_cache, meta, batch.scale)
        torch.testing.assert_close(together[row], alone, atol=1e-6, rtol=1e-6)


def cpu_attention_row(batch: PagedBatch, row: int) -> ops.AttentionMetadata:
    query, context = batch.meta.query_lens[row], batch.meta.context_lens[row]
    return ops.AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, query]).int(),
        seqlens_k=torch.tensor([context]).int(),
        block_table=batch.meta.block_table[row : row + 1],
        slot_mapping=batch.meta.slot_mapping[:0],
        max_query_len=query,
        max_seqlen_k=context,
        query_lens=(query,),
        context_lens=(context,),
    )


def test_groups_cover_every_token_once_and_pad_within_bounds() -> None:
    query_lens = [1, 1, 5, 1, 5, 1, 5, 2, 1]
    context_lens = [400, 3, 5, 390, 77, 80, 5, 2, 1]
    batch = paged_batch(query_lens, context_lens, Shape())
    groups = group_rows(query_lens, context_lens, batch.meta.block_table, 4)
    tokens = torch.cat([group.tokens for group in groups])
    assert sorted(tokens.tolist()) == list(range(sum(query_lens)))
    assert len(groups) > 4, "contexts this far apart belong to several groups"
    for group in groups:
        blocks = -(-group.seqlens_k // 4)
        padding = len(group.block_ids) - int(blocks.sum())
        assert 0 <= padding <= MAX_PADDING
        assert len(group.tokens) == group.num_rows * group.query_len


def test_rows_of_one_group_stay_in_order() -> None:
    """Chunks become rows in the order in which the scheduler listed them (REGRESSIONS 16)."""
    context_lens = [9, 30, 12, 29, 10, 31]
    batch = paged_batch([1] * 6, context_lens, Shape())
    for group in group_rows([1] * 6, context_lens, batch.meta.block_table, 4):
        assert group.tokens.tolist() == sorted(group.tokens.tolist())


def test_masks_are_made_once_a_step() -> None:
    batch = paged_batch([3, 1], [9, 5], Shape())
    arguments = (batch.q, batch.k_cache, batch.v_cache, batch.meta, batch.scale)
    ops.paged_attention(*arguments)
    groups = batch.meta.row_groups(4)
    masks = [dict(group.masks) for group in groups]
    ops.paged_attention(*arguments)
    assert batch.meta.row_groups(4) is groups
    for group, before in zip(groups, masks, strict=True):
        assert group.masks.keys() == before.keys()
        assert all(group.masks[window] is mask for window, mask in before.items())


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("raises", [False, True])
def test_little_attention_leaves_the_number_of_threads_as_it_was(
    num_threads: int, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = cpu_attention.scaled_dot_product_attention

    def watching(*args: object, **kwargs: object) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if raises:
            raise RuntimeError("as told")
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_attention, "scaled_dot_product_attention", watching)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        little = paged_batch([1, 1], [9, 10], Shape())
        much = paged_batch([1], [4 * ONE_THREAD_BLOCKS + 1], Shape())
        for batch in (little, much):
            arguments = (batch.q, batch.k_cache, batch.v_cache, batch.meta, batch.scale)
            if raises:
                with pytest.raises(RuntimeError):
                    ops.paged_attention(*arguments)
            else:
                ops.paged_attention(*arguments)
            assert torch.get_num_threads() == num_threads
        assert seen == [1, num_threads]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_and_queries_of_another_dtype(dtype: torch.dtype) -> None:
    """Half precision rounds inputs and result; what lies between is the reference's."""
    batch = paged_batch(*STEPS["all at once"], Shape()).in_dtype(dtype)
    arguments = (batch.q, batch.k_cache, batch.v_cache, batch.meta, batch.scale)
    out = ops.paged_attention(*arguments)
    assert out.dtype == dtype
    slow = reference.paged_attention(*arguments)
    torch.testing.assert_close(out, slow, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_written_kv_is_where_the_slots_say_and_nowhere_else(
    shape: Shape, cache_dtype: torch.dtype
) -> None:
    meta = paged_batch([5, 1, 9], [11, 30, 9], shape).meta
    num_blocks = int(meta.block_table.max()) + 1
    k, v = torch.randn(2, 15, shape.num_kv_heads, shape.head_dim).unbind()
    fast, slow = (empty_caches(num_blocks, shape, cache_dtype) for _ in range(2))
    ops.write_kv(k, v, *fast, meta.slot_mapping)
    reference.write_kv(k, v, *slow, meta.slot_mapping)
    for tensor, cache, expected in zip((k, v), fast, slow, strict=True):
        assert torch.equal(cache, expected)
        flat = cache.reshape(-1, shape.num_kv_heads, shape.head_dim)
        assert torch.equal(flat[meta.slot_mapping], tensor.to(cache_dtype))
        others = torch.ones(len(flat), dtype=torch.bool)
        others[meta.slot_mapping] = False
        assert (flat[others] == empty_caches(1, shape, cache_dtype)[0].flatten()[0]).all()
