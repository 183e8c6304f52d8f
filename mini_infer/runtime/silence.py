"""How long a process has given no sign of life, as another one sees it."""

import mmap
import os
import struct
import tempfile
import time

PAGE = struct.Struct("=qq")
"""Memory that two processes share: beats so far, and how many threads ask for patience."""
HUNG_EXIT_CODE = 86
"""Of a process that has ended itself because its work hung."""
LOOK_SECONDS = 0.5
SILENCE_SECONDS = 5.0
"""After so long without a beat a process is taken for stopped. A thread of its own beats four times
a second, whatever the others do, and needs the interpreter for microseconds."""
PATIENT_SECONDS = 300.0
"""The same while libraries and weights are read, or a profile is put together, which keep the
interpreter for seconds; for minutes, where gigabytes of libraries come over a slow network."""


def shared_memory(num_bytes: int) -> int:
    """A descriptor of so many noughts, to map and to pass to a child, and no file where the system
    has other memory: who writes to a page of a file may have to wait for a busy disk, here with the
    interpreter's lock (E. Jones, "The four month bug", 2015)."""
    try:
        descriptor = os.memfd_create("mini-infer")
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, num_bytes)
    return descriptor


class Silence:
    """Looks at what a ``Pulse`` writes. Not messages: nobody has to read them, and a process that
    is stopped leaves none unread."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._num_beats = 0
        self._last_look = time.monotonic()
        self._seconds = 0.0

    def look(self) -> float | None:
        """Seconds of silence where they are too many, else None. To be asked every
        ``LOOK_SECONDS``: between two looks no more than twice that counts, so that nobody is found
        silent by a process that was suspended itself. Before the first beat nothing does."""
        now = time.monotonic()
        passed = min(now - self._last_look, 2 * LOOK_SECONDS)
        self._last_look = now
        num_beats, num_patient = PAGE.unpack_from(self._page)
        if num_beats and num_beats == self._num_beats:
            self._seconds += passed
        else:
            self._num_beats, self._seconds = num_beats, 0.0
        limit = PATIENT_SECONDS if num_patient else SILENCE_SECONDS
        return self._seconds if self._seconds > limit else None
