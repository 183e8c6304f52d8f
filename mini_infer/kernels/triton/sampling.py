"""From logits to tokens in two launches, whatever the batch's rows ask for.

``scan_kernel`` reads the logits once, each row by several programs, and leaves the best noisy token
of every part of a row. ``finish_kernel`` takes the best of a row's parts; a row with top-k, top-p
or min-p also finds the set that it keeps (``truncation``). What a row asks for is read on the
device, so that a CUDA graph fits every batch of its size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.sampling import INTEGERS, REALS
from mini_infer.kernels.triton.launch import num_sms, starts_early
from mini_infer.kernels.triton.noise import (
    divide,
    negative_gumbel,
    order_key,
    rank_key,
    row_keys,
    token_of,
)
from mini_infer.kernels.triton.truncation import draw_truncated

SCANNED = 1024
"""Logits that a program of ``scan_kernel`` takes at a time."""
SCAN_WARPS = 4
PROGRAMS_PER_SM = 12
MAX_PARTS = 256
FINISHED = 4096
"""Logits that a program of ``finish_kernel`` takes at a time, where it has to read them."""
FINISH_WARPS = 16
LISTED = 2048
"""Candidates at the edge of the kept set that are ranked one by one."""

ROW_POINTERS = ["slots_ptr", "num_tokens_ptr"]
"""Read a number at a time. Where rows are odd one is not aligned: no reason to compile again."""

TEMPERATURE = tl.constexpr(REALS.index("temperature"))
TOP_P = tl.constexpr(REALS.index("top_p"))
LOG_MIN_P = tl.constexpr(REALS.index("log_min_p"))
SEED = tl.constexpr(INTEGERS.index("seed"))
TOP_K = tl.constexpr(INTEGERS.index("top_k"))
LOWEST_KEY = tl.constexpr(-(2**63))


def draw(
    logits: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    reals: Tensor,
    integers: Tensor,
    token_hashes: Tensor,
    token_table: Tensor | None = None,
) -> Tensor:
    """Draws a token for every row: temperature, top-k, top-p, min-p, with the noise and the ties of
    ``mini_infer.kernels.sampling``.

    Args:
        logits: ``[R, V]``, any float dtype, rows contiguous; read-only.
        slots: ``[R]`` integers; like the tables, not written by a kernel of the same step.
        num_tokens: ``[R]`` integers: how many tokens stand before the one to sample.
        reals: ``[slots, len(REALS)]`` float64: what each slot asks for.
        integers: ``[slots, len(INTEGERS)]`` int64.
        token_hashes: ``[V]`` int32, of ``sampling.token_hashes``.
        token_table: ``[slots, length]`` integers; gets each token at ``[slot, num_tokens]``.

    Returns:
        ``[R]`` int64 ids in ``[0, V)``: a row of only -inf gives 0, and NaN is the largest logit.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    early = starts_early(device)
    tiles = triton.cdiv(vocab_size, SCANNED)
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms(device), num_rows)
    tiles_per_part = triton.cdiv(tiles, min(tiles, wanted, MAX_PARTS))
    num_parts = triton.cdiv(tiles, tiles_per_part)
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=device)
    highest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    candidates = torch.empty(num_rows, LISTED, dtype=torch.int64, device=device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    scan_kernel[num_parts, num_rows](
        logits,
        logits.stride(0),
        slots,
        num_tokens,
        reals,
        reals.stride(0),
        integers,
        integers.stride(0),
        token_hashes,
        best,
        highest,
        vocab_size,
        tiles_per_part,
        tile=SCANNED,
        early=early,
        num_warps=SCAN_WARPS,
        launch_pdl=early,
    )
    if token_table is None:
        token_table = torch.empty(1, 0, dtype=torch.int32, device=device)
    finish_kernel[num_rows,](
        logits,
        logits.stride(0),
        slots,
        num_tokens,
        reals,
        reals.stride(0),
        integers,
        integers.stride(0),
        token_hashes,
        best,
        highest,
        candidates,
        token_ids,
        token_table,
        token_table.stride(0),
        token_table.shape[1],
        vocab_size,
        num_parts,
        padded_parts=MAX_PARTS,
        tile=FINISHED,
        listed=LISTED,
        early=early,
        num_warps=FINISH_WARPS,
        launch_pdl=early,
    )
    return token_ids


@triton.jit(
    do_not_specialize=["reals_stride", "integers_stride", "tiles_per_part"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def scan_kernel(
    logits_ptr,
    row_stride,
    slots_ptr,
    num_tokens_ptr,
    reals_ptr,
    reals_stride,
    integers_ptr,
    integers_stride,
    hashes_ptr,
    best_ptr,
    highest_ptr,
    vocab_size,
    tiles_per_part,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    """``best [R, parts]``: the rank key of the best noisy score; ``highest``: the largest logit.

    Grid: (parts, rows). Without a temperature scores are the logits.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(reals_ptr + slot * reals_stride + TEMPERATURE).to(tl.float32)
    seed = tl.load(integers_ptr + slot * integers_stride + SEED)
    if early:
        tl.extra.cuda.gdc_wait()
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, tile)
    first = part * tiles_per_part * tile
    end = tl.minimum(first + tiles_per_part * tile, vocab_size)
    # Each lane keeps its best; its ids ascend, so the first of equals stays. NaN stays too.
    best = tl.full([tile], float("-inf"), tl.float32)
    best_id = first + lanes
    highest = best
    if temperature > 0.0:
        reciprocal = tl.div_rn(1.0, temperature)
        key0, key1 = row_keys(seed, tl.load(num_tokens_ptr + row).to(tl.int64))
        for start in range(first, end, tile):
            ids = start + lanes
            inside = ids < vocab_size
            hashes = tl.load(hashes_ptr + ids, mask=inside, other=0).to(tl.uint32, bitcast=True)
            x = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
            highest = tl.maximum(highest, x)
            score = divide(x, temperature, reciprocal) - negative_gumbel(hashes, key0, key1)
            better = ((score > best) | (score != score)) & (best == best)
            best = tl.where(better, score, best)
            best_id = tl.where(better, ids, best_id)
    else:
        for start in range(first, end, tile):
            ids = start + lanes
            x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            better = ((x > best) | (x != x)) & (best == best)
            best = tl.where(better, x, best)
            best_id = tl.where(better, ids, best_id)
    place = row * tl.num_programs(0) + part
    tl.store(best_ptr + place, tl.max(rank_key(best, best_id), 0))
    tl.store(highest_ptr + place, tl.max(highest, 0))


@triton.jit(
    do_not_specialize=[
        "reals_stride",
        "integers_stride",
        "table_stride",
        "table_length",
        "num_parts",
    ],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def finish_kernel(
    logits_ptr,
    row_stride,
    slots_ptr,
    num_tokens_ptr,
    reals_ptr,
    reals_stride,
    integers_ptr,
    integers_stride,
    hashes_ptr,
    best_ptr,
    highest_ptr,
    candidates_ptr,
    token_ids_ptr,
    table_ptr,
    table_stride,
    table_length,
    vocab_size,
    num_parts,
    padded_parts: tl.constexpr,
    tile: tl.constexpr,
    listed: tl.constexpr,
    early: tl.constexpr,
):
    """A row's token, from its parts. Grid: (rows)."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    real = reals_ptr + slot * reals_stride
    temperature = tl.load(real + TEMPERATURE).to(tl.float32)
    top_p = tl.load(real + TOP_P).to(tl.float32)
    log_min_p = tl.load(real + LOG_MIN_P).to(tl.float32)
    seed = tl.load(integers_ptr + slot * integers_stride + SEED)
    top_k = tl.load(integers_ptr + slot * integers_stride + TOP_K)
    if early:
        tl.extra.cuda.gdc_wait()
    position = tl.load(num_tokens_ptr + row).to(tl.int64)
    parts = tl.arange(0, padded_parts)
    place = row * num_parts + parts
    best = tl.max(tl.load(best_ptr + place, mask=parts < num_parts, other=LOWEST_KEY), 0)
    truncates = (top_k > 0) | (top_p < float("inf")) | (log_min_p > float("-inf"))
    if (temperature > 0.0) & truncates:
        highest = tl.load(highest_ptr + place, mask=parts < num_parts, other=float("-inf"))
        score_key = (best >> 32).to(tl.int32)
        infinite = order_key(tl.full([], float("inf"), tl.float32))
        # The best of a row with NaN or infinity is that; one of only -inf keeps its first.
        if (score_key < infinite) & (score_key > order_key(tl.full([], float("-inf"), tl.float32))):
            best = draw_truncated(
                logits_ptr + row.to(tl.int64) * row_stride,
                hashes_ptr,
                candidates_ptr + row.to(tl.int64) * listed,
                vocab_size,
                best,
                tl.max(highest, 0),
                temperature,
                top_k,
                top_p,
                log_min_p,
                seed,
                position,
                tile,
                listed,
            )
    token_id = token_of(best)
    tl.store(token_ids_ptr + row, token_id)
    token = token_id.to(table_ptr.dtype.element_ty)
    tl.store(table_ptr + slot * table_stride + position, token, mask=position < table_length)
