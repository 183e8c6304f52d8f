"""The pulse of an engine's process: it beats while the process runs and its loop gets on.

A process that is stopped, or in which native code keeps the interpreter's lock for good, beats no
more: its server sees that (``Silence``), and kills it. Where only the loop hangs, the thread that
beats sees it, says where, and ends the process itself.
"""

import contextlib
import faulthandler
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.silence import HUNG_EXIT_CODE, PAGE
from mini_infer.runtime.step_limit import step_limit

BEAT_SECONDS = 0.25
COMPILE_SECONDS = 300.0
"""That a kernel may take to be compiled, where a step meets one that was not expected."""


class Pulse:
    """One for each engine. Without a page, and not started, it is only a counter that nobody reads.

    The loop's thread tells of its turns, at the price of an addition each; the thread that beats
    looks at a clock.
    """

    def __init__(self, page: mmap.mmap | None = None) -> None:
        """``page`` is what ``Silence`` looks at. It asks for patience before ``watch``."""
        self._page = page
        self._turn = 0
        """Odd while the loop works, even while it waits for somebody else."""
        self._core: EngineCore | None = None
        self._loop_thread = 0
        self._num_beats, self._num_patient = 0, 0
        self._writing = threading.Lock()
        self._ask_for_patience(1)

    def start(self, on_hang: Callable[[float], None] | None = None) -> None:
        """Beats from now on. ``on_hang`` is told, once, for how many seconds the loop has hung;
        by default it ends the process."""
        thread = threading.Thread(
            target=self._beat, args=(on_hang or _end_process,), name="mini-infer-pulse", daemon=True
        )
        thread.start()

    def watch(self, core: EngineCore) -> None:
        """The calling thread is the loop's from now on; the model is loaded."""
        self._core = core
        self._loop_thread = threading.get_ident()
        self._ask_for_patience(-1)

    def begin(self) -> None:
        """The loop begins what takes no longer than ``step_limit`` says."""
        self._turn += 1

    def end(self) -> None:
        """The loop is done with it."""
        self._turn += 1

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Around what may keep the interpreter for seconds, as loading does; on any thread."""
        self._ask_for_patience(1)
        try:
            yield
        finally:
            self._ask_for_patience(-1)

    def _ask_for_patience(self, more: int) -> None:
        with self._writing:
            self._num_patient += more
            self._count()  # or the silence that it asked patience for would be too long at its end

    def _count(self) -> None:
        self._num_beats += 1
        if self._page is not None:
            PAGE.pack_into(self._page, 0, self._num_beats, self._num_patient)

    def _beat(self, on_hang: Callable[[float], None]) -> None:
        turn, stuck = 0, 0.0
        last = time.monotonic()
        while stuck <= self._limit(stuck):
            with self._writing:
                self._count()
            time.sleep(BEAT_SECONDS)
            now = time.monotonic()
            # More of it is time in which the machine was suspended, or too busy for this thread.
            passed = min(now - last, 2 * BEAT_SECONDS)
            last = now
            stuck = stuck + passed if self._turn == turn and turn % 2 else 0.0
            turn = self._turn
        on_hang(stuck)

    def _limit(self, stuck: float) -> float:
        """Seconds that what the loop does now may take. Asked four times a second, so what costs
        something is looked at only when it matters."""
        if self._core is None or stuck <= 0:
            return stuck
        limit = step_limit(self._core.config, self._core.under_way)
        if stuck > limit and _compiles(sys._current_frames().get(self._loop_thread)):
            return COMPILE_SECONDS
        return limit


def _compiles(frame: FrameType | None) -> bool:
    """Is a kernel being compiled there? Triton's are compiled before the first request, but for
    what nobody foresaw."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "triton.compiler.compiler" and frame.f_code.co_name == "compile":
            return True
        frame = frame.f_back
    return False


def _end_process(stuck: float) -> NoReturn:
    with contextlib.suppress(OSError):  # a full disk
        print(f"the engine hangs: a step has taken {stuck:.0f} s. It is here:", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
    os._exit(HUNG_EXIT_CODE)
