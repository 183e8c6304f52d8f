"""Flash Decoding: short queries over long contexts, the context split over the processors.

A decoding request has one query (or 1 + k, with drafts) per head, and all of its keys and values to
read. One program per request and head would leave most of a GPU idle, so each context is cut into
splits that are attended independently; a second kernel weighs their results by their softmax sums
(Flash-Decoding, Dao et al. 2023; the weighing is that of arXiv 2205.14135, appendix B).
"""

import triton
import triton.language as tl

from mini_infer.kernels.triton.paged_tiles import attend_tile, block_ids, key_offsets, load_tile


@triton.jit(do_not_specialize=["table_stride", "num_splits", "query_limit"])
def split_kernel(
    q_ptr,
    k_cache,
    v_cache,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    cu_seqlens_q,
    seqlens_k,
    block_table,
    table_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    token_stride,
    head_stride,
    scale_log2,
    num_splits,
    query_limit,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    window: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    is_whole: tl.constexpr,
    early: tl.constexpr,
):
    """One split of one row's context, for the ``group`` query heads of one key-value head.

    Grid: (key-value heads, splits, rows): programs that run
    side by side read neighbouring memory. Writes ``out`` where one split ``is_whole``, else
    ``partial [R, query_limit, H, splits, D]`` and ``log_sum [R, query_limit, H, splits]``, both
    float32.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_seqlens_q + row).to(tl.int32)
    query_len = tl.load(cu_seqlens_q + row + 1).to(tl.int32) - begin
    context = tl.load(seqlens_k + row).to(tl.int32)
    if early:  # rotary_and_write_kernel may still be writing queries, keys and values
        tl.extra.cuda.gdc_wait()
    if query_len > query_limit:
        return  # a long chunk: tiled_attention's

    rows = tl.arange(0, tile_rows)
    dims = tl.arange(0, padded_dim)
    token = rows // group
    head = kv_head * group + rows % group
    is_query = token < query_len
    inside = is_query[:, None] & (dims[None, :] < head_dim)
    query = (begin + token).to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + query[:, None] + dims[None, :], mask=inside, other=0.0)
    position = context - query_len + token

    lowest = 0
    if window > 0:
        lowest = tl.maximum(context - query_len - window + 1, 0)
    tiles = tl.cdiv(context - lowest, tile_keys)
    span = tl.cdiv(tiles, num_splits) * tile_keys
    start = lowest + split * span
    end = tl.minimum(start + span, context)

    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    table = block_table + row.to(tl.int64) * table_stride
    # Loaded a tile ahead, so that the address of a key is known when its load is due.
    blocks = block_ids(table, start, end, block_size, tile_keys)
    acc = tl.zeros([tile_rows, padded_dim], tl.float32)
    row_sum = tl.zeros([tile_rows], tl.float32)
    row_max = tl.full([tile_rows], float("-inf"), tl.float32)
    for first_key in range(start, end, tile_keys):
        next_blocks = block_ids(table, first_key + tile_keys, end, block_size, tile_keys)
        offsets = key_offsets(blocks, first_key, block_stride, token_stride, block_size, tile_keys)
        k = load_tile(k_head, offsets, first_key, end, head_dim, padded_dim, tile_keys, True)
        v = load_tile(v_head, offsets, first_key, end, head_dim, padded_dim, tile_keys, True)
        keys = first_key + tl.arange(0, tile_keys)[None, :]
        visible = (keys < end) & (keys <= position[:, None])
        if window > 0:
            visible &= keys > position[:, None] - window
        acc, row_sum, row_max = attend_tile(
            acc, row_sum, row_max, q, k, v, visible, scale_log2, True
        )
        blocks = next_blocks
    seen = row_sum > 0.0  # an empty split, or keys that are newer than the query
    result = acc / tl.where(seen, row_sum, 1.0)[:, None]
    if is_whole:
        target = ((begin + token).to(tl.int64) * num_heads + head) * head_dim
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target[:, None] + dims[None, :], out, mask=inside)
    else:
        target = ((row * query_limit + token) * num_heads + head) * num_splits + split
        log_sum = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
        tl.store(log_sum_ptr + target, log_sum, mask=is_query)
        place = target.to(tl.int64) * head_dim
        tl.store(partial_ptr + place[:, None] + dims[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["num_splits", "query_limit"])
def reduce_kernel(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    cu_seqlens_q,
    num_splits,
    query_limit,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile_dims: tl.constexpr,
    tile_splits: tl.constexpr,
    early: tl.constexpr,
):
    """Weighs all splits of some dimensions of one query head, in one tile: this is all latency.

    Grid: (rows * query_limit, heads, cdiv(head_dim, tile_dims)); ``tile_splits >= num_splits``.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    item, head = tl.program_id(0), tl.program_id(1)
    row, token = item // query_limit, item % query_limit
    begin = tl.load(cu_seqlens_q + row).to(tl.int32)
    query_len = tl.load(cu_seqlens_q + row + 1).to(tl.int32) - begin
    dims = tl.program_id(2) * tile_dims + tl.arange(0, tile_dims)
    splits = tl.arange(0, tile_splits)
    # Rows that split_kernel skipped were never written: they are not read either.
    exists = (splits < num_splits) & (query_len <= query_limit) & (token < query_len)
    source = (item * num_heads + head).to(tl.int64) * num_splits + splits
    place = source[:, None] * head_dim + dims[None, :]
    if early:
        tl.extra.cuda.gdc_wait()
    log_sum = tl.load(log_sum_ptr + source, mask=exists, other=float("-inf"))
    inside = exists[:, None] & (dims[None, :] < head_dim)
    parts = tl.load(partial_ptr + place, mask=inside, other=0.0)
    highest = tl.max(log_sum, 0)
    weight = tl.exp2(log_sum - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    target = ((begin + token).to(tl.int64) * num_heads + head) * head_dim + dims
    is_query = (query_len <= query_limit) & (token < query_len)
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=is_query & (dims < head_dim))
