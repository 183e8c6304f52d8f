"""Shapes of attention's tiles, and whether they fit a processor."""

from dataclasses import dataclass, replace

from mini_infer.kernels.triton.launch import power_of_two


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of a program's work, and the resources that it gets."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread, where the compiler would take more and leave room for fewer programs."""


def fit(tiles: Tiles, head_bytes: int, shared_memory: int) -> Tiles:
    """Fewer stages, then fewer keys, until queries, keys and values of a program fit its memory.

    ``head_bytes`` is the size of one key.
    """
    padded = power_of_two(head_bytes)
    reserved = tiles.rows * padded + 1024
    keys, stages = tiles.keys, tiles.num_stages
    while reserved + 2 * keys * padded * stages > shared_memory and (stages > 2 or keys > 16):
        if stages > 2:
            stages -= 1
        else:
            keys //= 2
    return replace(tiles, keys=keys, num_stages=stages)
