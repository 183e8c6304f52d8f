"""How long a process has given no sign of life, as another one sees it."""

import contextlib
import struct
import time
from pathlib import Path

PULSE = "pulse"
"""The name of the page's file."""
PAGE = struct.Struct("=qq")
"""A page of memory that two processes share: beats so far, and whether it asks for patience."""
HUNG_EXIT_CODE = 86
"""Of a process that has ended itself because its work hung."""
LOOK_SECONDS = 0.5
SILENCE_SECONDS = 5.0
"""After so long without a beat a process is taken for stopped. A thread of its own beats four times
a second, whatever the others do, and needs the interpreter for microseconds."""
PATIENT_SECONDS = 300.0
"""The same while libraries and weights are read, or a profile is put together, which keep the
interpreter for seconds; for minutes, where gigabytes of libraries come over a slow network."""


class Silence:
    """Looks at what a ``Pulse`` writes. Not messages: nobody has to read them, and a process that
    is stopped leaves none unread."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        with contextlib.suppress(OSError, struct.error):  # not made yet, or gone with its process
            num_beats, is_patient = PAGE.unpack(self._path.read_bytes())
            if num_beats and num_beats == self._num_beats:
                self._seconds += passed
            else:
                self._num_beats, self._seconds = num_beats, 0.0
            if self._seconds > (PATIENT_SECONDS if is_patient else SILENCE_SECONDS):
                return self._seconds
        return None
