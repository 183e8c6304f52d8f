"""From logits to tokens in two launches, whatever the batch's rows ask for.

``scan_kernel`` reads the logits once, each row by several programs, and leaves the best noisy token
of every part of a row; of a row with top-k, top-p or min-p also a summary of every segment.
``finish_kernel`` takes the best of a row's parts, or finds the set that the row keeps
(``truncation``). What a row asks for is read on the device, so that a CUDA graph fits every batch
of its size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.sampling import INTEGERS, REALS
from mini_infer.kernels.triton.launch import num_sms, power_of_two, starts_early
from mini_infer.kernels.triton.noise import (
    divide,
    negative_gumbel,
    order_key,
    rank_key,
    row_keys,
    token_of,
)
from mini_infer.kernels.triton.truncation import LOG2_E, draw_truncated

SCANNED = 1024
"""Logits that a program of ``scan_kernel`` takes at a time."""
SCAN_WARPS = 4
PROGRAMS_PER_SM = 12
MAX_PARTS = 256
FINISHED = 4096
"""Logits that a program of ``finish_kernel`` takes at a time, where it has to read them."""
FINISH_WARPS = 8
FINISH_REGISTERS: int | None = 128
"""A thread: two programs share an SM."""
LISTED = 2048
"""Tokens among which a search by passes ends."""
FEW = 512
"""Candidates that are compared pair by pair."""
SEGMENT = 128

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
    num_segments = triton.cdiv(vocab_size, SEGMENT)
    padded_segments = power_of_two(num_segments)
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=device)
    segment_best = torch.empty(num_rows, num_segments, dtype=torch.int64, device=device)
    # Not two rows of one tensor: how the second one is aligned would depend on the batch, and each
    # way is a kernel of its own, compiled when a step needs it.
    segment_highest, segment_mass = (
        torch.empty(num_rows, num_segments, dtype=torch.float32, device=device) for _ in range(2)
    )
    candidates = torch.empty(num_rows, max(LISTED, FEW), dtype=torch.int64, device=device)
    places = torch.empty(num_rows, padded_segments, dtype=torch.int32, device=device)
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
        segment_best,
        segment_highest,
        segment_mass,
        vocab_size,
        tiles_per_part,
        num_segments,
        tile=SCANNED,
        segment=SEGMENT,
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
        segment_best,
        segment_highest,
        segment_mass,
        candidates,
        candidates.stride(0),
        places,
        token_ids,
        token_table,
        token_table.stride(0),
        token_table.shape[1],
        vocab_size,
        num_parts,
        num_segments,
        padded_parts=MAX_PARTS,
        padded_segments=padded_segments,
        tile=FINISHED,
        listed=LISTED,
        few=FEW,
        segment=SEGMENT,
        early=early,
        num_warps=FINISH_WARPS,
        maxnreg=FINISH_REGISTERS,
        launch_pdl=early,
    )
    return token_ids


@triton.jit
def truncates(temperature, top_k, top_p, log_min_p):
    """Does a row keep only some of its tokens?"""
    return (temperature > 0.0) & (
        (top_k > 0) | (top_p < float("inf")) | (log_min_p > float("-inf"))
    )


@triton.jit(
    do_not_specialize=["reals_stride", "integers_stride", "tiles_per_part", "num_segments"],
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
    segment_best_ptr,
    segment_highest_ptr,
    segment_mass_ptr,
    vocab_size,
    tiles_per_part,
    num_segments,
    tile: tl.constexpr,
    segment: tl.constexpr,
    early: tl.constexpr,
):
    """``best [R, parts]``: the rank key of the best noisy score, which without a temperature is the
    largest logit.

    Of truncated rows also, ``[R, segments]``: the same, the largest logit, and the mass in units of
    that. Grid: (parts, rows).
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    real = reals_ptr + slot * reals_stride
    temperature = tl.load(real + TEMPERATURE).to(tl.float32)
    top_p = tl.load(real + TOP_P).to(tl.float32)
    log_min_p = tl.load(real + LOG_MIN_P).to(tl.float32)
    seed = tl.load(integers_ptr + slot * integers_stride + SEED)
    top_k = tl.load(integers_ptr + slot * integers_stride + TOP_K)
    if early:
        tl.extra.cuda.gdc_wait()
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, tile)
    first = part * tiles_per_part * tile
    end = tl.minimum(first + tiles_per_part * tile, vocab_size)
    # Each lane keeps its best; its ids ascend, so the first of equals stays. NaN stays too.
    best = tl.full([tile], float("-inf"), tl.float32)
    best_id = first + lanes
    place = row * tl.num_programs(0) + part
    if truncates(temperature, top_k, top_p, log_min_p):
        reciprocal = tl.div_rn(1.0, temperature)
        scale = LOG2_E / temperature
        key0, key1 = row_keys(seed, tl.load(num_tokens_ptr + row).to(tl.int64))
        in_tile = tl.arange(0, tile // segment)
        offset = in_tile[:, None] * segment + tl.arange(0, segment)[None, :]
        bests = tl.full([tile // segment], LOWEST_KEY, tl.int64)
        for start in range(first, end, tile):
            ids = start + offset
            inside = ids < vocab_size
            hashes = tl.load(hashes_ptr + ids, mask=inside, other=0).to(tl.uint32, bitcast=True)
            x = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
            score = divide(x, temperature, reciprocal) - negative_gumbel(hashes, key0, key1)
            segment_best = tl.max(rank_key(score, ids), 1)
            highest = tl.max(x, 1)
            unit = tl.where(highest > float("-inf"), highest, 0.0)
            mass = tl.sum(tl.exp2((x - unit[:, None]) * scale), 1)
            index = start // segment + in_tile
            target = row * num_segments + index
            exists = index < num_segments
            tl.store(segment_best_ptr + target, segment_best, mask=exists)
            tl.store(segment_highest_ptr + target, highest, mask=exists)
            tl.store(segment_mass_ptr + target, mass, mask=exists)
            bests = tl.maximum(bests, segment_best)
        tl.store(best_ptr + place, tl.max(bests, 0))
    elif temperature > 0.0:
        reciprocal = tl.div_rn(1.0, temperature)
        key0, key1 = row_keys(seed, tl.load(num_tokens_ptr + row).to(tl.int64))
        for start in range(first, end, tile):
            ids = start + lanes
            inside = ids < vocab_size
            hashes = tl.load(hashes_ptr + ids, mask=inside, other=0).to(tl.uint32, bitcast=True)
            x = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
            score = divide(x, temperature, reciprocal) - negative_gumbel(hashes, key0, key1)
            better = ~(score <= best) & (best == best)
            best = tl.where(better, score, best)
            best_id = tl.where(better, ids, best_id)
        tl.store(best_ptr + place, tl.max(rank_key(best, best_id), 0))
    else:
        for start in range(first, end, tile):
            ids = start + lanes
            x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            better = ~(x <= best) & (best == best)
            best = tl.where(better, x, best)
            best_id = tl.where(better, ids, best_id)
        tl.store(best_ptr + place, tl.max(rank_key(best, best_id), 0))


@triton.jit(
    do_not_specialize=[
        "reals_stride",
        "integers_stride",
        "table_stride",
        "table_length",
        "num_parts",
        "num_segments",
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
    segment_best_ptr,
    segment_highest_ptr,
    segment_mass_ptr,
    candidates_ptr,
    candidates_stride,
    places_ptr,
    token_ids_ptr,
    table_ptr,
    table_stride,
    table_length,
    vocab_size,
    num_parts,
    num_segments,
    padded_parts: tl.constexpr,
    padded_segments: tl.constexpr,
    tile: tl.constexpr,
    listed: tl.constexpr,
    few: tl.constexpr,
    segment: tl.constexpr,
    early: tl.constexpr,
):
    """A row's token, from its parts. Grid: (rows)."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
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
    keys = tl.load(best_ptr + row * num_parts + parts, mask=parts < num_parts, other=LOWEST_KEY)
    best = tl.max(keys, 0)
    if truncates(temperature, top_k, top_p, log_min_p):
        score_key = (best >> 32).to(tl.int32)
        infinity = tl.full([], float("inf"), tl.float32)
        # The best of a row with NaN or infinity is that; one of only -inf keeps its first.
        if (score_key < order_key(infinity)) & (score_key > order_key(-infinity)):
            best = draw_truncated(
                logits_ptr + row * row_stride,
                hashes_ptr,
                candidates_ptr + row * candidates_stride,
                places_ptr + row * padded_segments,
                segment_highest_ptr + row * num_segments,
                segment_mass_ptr + row * num_segments,
                segment_best_ptr + row * num_segments,
                num_segments,
                vocab_size,
                best,
                temperature,
                top_k,
                top_p,
                log_min_p,
                seed,
                position,
                tile,
                listed,
                few,
                segment,
                padded_segments,
            )
    token_id = token_of(best)
    tl.store(token_ids_ptr + row, token_id)
    token = token_id.to(table_ptr.dtype.element_ty)
    tl.store(table_ptr + slot * table_stride + position, token, mask=position < table_length)
