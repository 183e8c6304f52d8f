"""Signs of life of the ranks: a page of memory that they and the engine share.

Not messages: nobody has to read them, and a rank that is stopped leaves none unread.
"""

import mmap
import struct
from typing import Protocol

_COUNTER = struct.Struct("=q")
_PER_RANK = 2 * _COUNTER.size


class StepCounter(Protocol):
    """The half of a rank's signs of life that its steps give."""

    def finish_step(self, rank: int) -> None:
        """``rank`` has launched all of a step, or failed to; where stages compute on a CPU, each
        of its layers as well."""
        ...


class RankBeats:
    """Two counters for each rank: beats of a thread of its own, and steps that it is done with.

    A rank writes its own, one thread each; eight aligned bytes are written at once.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Maps the memory, ``num_bytes`` of ``size`` ranks, that has this ``descriptor``."""
        self._memory = mmap.mmap(descriptor, self.num_bytes(size))
        self._size = size

    @staticmethod
    def num_bytes(size: int) -> int:
        """What ``size`` ranks take."""
        return size * _PER_RANK

    def beat(self, rank: int) -> None:
        """The process of ``rank`` runs."""
        self._count(rank * _PER_RANK)

    def finish_step(self, rank: int) -> None:
        """``rank`` has launched all of a step, or failed to."""
        self._count(rank * _PER_RANK + _COUNTER.size)

    def read(self) -> list[tuple[int, int]]:
        """Beats and steps of each rank so far."""
        counters = struct.unpack(f"={2 * self._size}q", self._memory[:])
        return list(zip(counters[::2], counters[1::2], strict=True))

    def close(self) -> None:
        """Lets go of the memory."""
        self._memory.close()

    def _count(self, offset: int) -> None:
        (count,) = _COUNTER.unpack_from(self._memory, offset)
        _COUNTER.pack_into(self._memory, offset, count + 1)
