"""The end of a decode step in a CUDA graph: tokens for the host, inputs for the next step."""

import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.triton.launch import starts_early

TILE = 256


@triton.jit(
    do_not_specialize=["num_rows", "null_slot", "num_results", "results_stride"],
    do_not_specialize_on_alignment=["slots", "starts", "turn"],
)
def publish_kernel(
    token_ids,
    slots,
    starts,
    results,
    turn,
    num_rows,
    null_slot,
    num_results,
    results_stride,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    """One program, for some loads and stores."""
    if early:
        tl.extra.cuda.gdc_wait()  # for the tokens, and for all who read the starts
    this_turn = tl.load(turn)
    result = results + this_turn * results_stride
    for first in range(0, num_rows, tile):
        rows = first + tl.arange(0, tile)
        exists = rows < num_rows
        slot = tl.load(slots + rows, mask=exists, other=null_slot)
        start = tl.load(starts + rows, mask=exists, other=0)
        tl.store(result + rows, tl.load(token_ids + rows, mask=exists), mask=exists)
        tl.store(starts + rows, start + 1, mask=exists & (slot != null_slot))
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn, tl.where(this_turn + 1 < num_results, this_turn + 1, 0))


def publish_(
    token_ids: Tensor,
    slots: Tensor,
    starts: Tensor,
    null_slot: int,
    results: Tensor,
    turn: Tensor,
) -> None:
    """See ``reference.publish_``; on a GPU ``results`` is pinned memory of the host.

    The device writes there itself. A copy would be one more thing between two steps, and so would
    the upload of inputs that the device can count up.
    """
    early = starts_early(token_ids.device)
    publish_kernel[1,](
        token_ids,
        slots,
        starts,
        results,
        turn,
        len(token_ids),
        null_slot,
        len(results),
        results.stride(0),
        tile=TILE,
        early=early,
        num_warps=4,
        launch_pdl=early,
    )
