"""Checkpoint files to a GPU's memory through a few pinned buffers.

Threads read the files in order, a chunk each; every chunk is copied to its place on the device
while the next ones are read. Plain reads, not a memory map: pages of a map count against the
process, and a device copies from pinned memory at twice the speed.

::

    file    ──read──►  pinned buffer 0  ─┐
            ──read──►  pinned buffer 1   ├─ asynchronous copy ──►  the parameter's own memory
            ──read──►  pinned buffer 2  ─┘
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mini_infer.modeling.safetensors_header import StoredTensor, unreadable


@dataclass(frozen=True, slots=True)
class Staging:
    """How much host memory a load takes, and how many threads fill it: two buffers at least.

    One thread copies from the system's file cache at 5-10 GB/s; a PCIe 5 link takes 50.
    """

    buffer_bytes: int = 16 << 20
    num_buffers: int = 9
    num_readers: int = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one tensor's elements within a chunk."""

    tensor: StoredTensor
    begin: int
    """Of its first byte in the tensor."""
    nbytes: int

    @property
    def is_last(self) -> bool:
        return self.begin + self.nbytes == self.tensor.nbytes


@dataclass(slots=True)
class Chunk:
    """A run of a file's bytes that is read at once: parts of tensors, side by side."""

    path: Path
    offset: int
    nbytes: int = 0
    parts: list[Part] = field(default_factory=list)

    def append(self, part: Part) -> None:
        self.parts.append(part)
        self.nbytes += part.nbytes


def plan_chunks(tensors: Iterable[StoredTensor], limit: int) -> Iterator[Chunk]:
    """Cuts tensors, in the order of their bytes, into chunks of at most ``limit`` bytes.

    No element is cut, so that a chunk can be converted by itself; ``limit`` is at least an element.
    A tensor that is left out ends a chunk, for the bytes of one are read in one piece.
    """
    chunk: Chunk | None = None
    for tensor in tensors:
        element, done = tensor.dtype.itemsize, 0
        while True:
            offset = tensor.offset + done
            room = 0
            if chunk and (chunk.path, chunk.offset + chunk.nbytes) == (tensor.path, offset):
                room = (limit - chunk.nbytes) // element * element
            if chunk is None or room == 0:
                if chunk:
                    yield chunk
                chunk, room = Chunk(tensor.path, offset), limit // element * element
            part = Part(tensor, done, min(room, tensor.nbytes - done))
            chunk.append(part)
            done += part.nbytes
            if part.is_last:
                break
    if chunk:
        yield chunk


class PinnedBuffer:
    """Host memory that a file is read into and a device copies from, by turns."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until the device has copied what was in here."""
        if self._copied:
            self._copied.synchronize()

    def read(self, chunk: Chunk) -> None:
        """Fills the buffer's head with the bytes of a chunk.

        Raises:
            WeightsError: the file is gone or has become shorter.
        """
        memory = self.bytes.numpy().data[: chunk.nbytes]
        try:
            with chunk.path.open("rb", buffering=0) as file:
                file.seek(chunk.offset)
                while memory:
                    count = file.readinto(memory)
                    if not count:
                        raise unreadable(chunk.path, "it ends too early")
                    memory = memory[count:]
        except OSError as error:
            raise unreadable(chunk.path, error) from None

    def copy_out(self, chunk: Chunk, places: dict[str, Tensor]) -> None:
        """Starts the copy of each part to its place, after all work of the current stream."""
        begin = 0
        for part in chunk.parts:
            end = begin + part.nbytes
            _copy(self.bytes[begin:end], part, places[part.tensor.name])
            begin = end
        if self._device.type == "cuda":  # others copy at once
            self._copied = torch.cuda.current_stream(self._device).record_event()


def _copy(source: Tensor, part: Part, place: Tensor) -> None:
    """``source [nbytes]`` uint8, on the host, to elements of ``place``, which is contiguous."""
    stored = part.tensor.dtype
    first, count = part.begin // stored.itemsize, part.nbytes // stored.itemsize
    target = place.view(-1)[first : first + count]
    if place.dtype == stored:
        target.view(torch.uint8).copy_(source, non_blocking=True)
    else:  # half the bytes, or twice as many, on the way: the device converts, not the host
        converted = torch.empty(part.nbytes, dtype=torch.uint8, device=place.device)
        target.copy_(converted.copy_(source, non_blocking=True).view(stored))


def stream_tensors(
    tensors: Iterable[StoredTensor], places: dict[str, Tensor], staging: Staging = Staging()
) -> Iterator[str]:
    """Copies each tensor into its place, all on one device, converted to the place's dtype.

    Yields a tensor's name, and forgets its place, once the device is told to copy the last of it:
    work that the current stream is given from then on finds the tensor there.

    Raises:
        WeightsError: a file can't be read.
    """
    chunks = deque(plan_chunks(tensors, staging.buffer_bytes))
    if not chunks:
        return
    device = next(iter(places.values())).device
    size = max(chunk.nbytes for chunk in chunks)
    count = min(staging.num_buffers, len(chunks) + 1)  # pinning memory takes time
    free = deque(PinnedBuffer(size, device) for _ in range(count))
    reads: deque[tuple[Chunk, PinnedBuffer, Future[None]]] = deque()
    with ThreadPoolExecutor(staging.num_readers, "weights") as readers:
        try:
            while chunks or reads:
                # One stays free: the one that the device has only begun to copy from.
                while chunks and len(free) > 1:
                    chunk, buffer = chunks.popleft(), free.popleft()
                    buffer.wait()
                    reads.append((chunk, buffer, readers.submit(buffer.read, chunk)))
                chunk, buffer, read = reads.popleft()
                read.result()
                buffer.copy_out(chunk, places)
                free.append(buffer)
                for part in chunk.parts:
                    if part.is_last:
                        del places[part.tensor.name]
                        yield part.tensor.name
        finally:
            for _, _, read in reads:
                read.cancel()
    for buffer in free:
        buffer.wait()
