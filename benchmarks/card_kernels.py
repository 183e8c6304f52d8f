"""The kernel that only reads: what bandwidth is measured with on a GPU."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
TILES_PER_PROGRAM = 8


@triton.jit
def _read(source, target, steps: tl.constexpr, tile: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([tile], tl.float32)
    for step in range(steps):
        offset = (program * steps + step) * tile + tl.arange(0, tile)
        total += tl.load(source + offset).to(tl.float32)
    tl.store(target + program, tl.sum(total, 0))


def read_all(source: Tensor, target: Tensor) -> None:
    """Reads ``source`` once; ``target`` float32 has one entry per ``TILE * TILES_PER_PROGRAM``."""
    _read[target.numel(),](source, target, steps=TILES_PER_PROGRAM, tile=TILE, num_warps=8)
