"""Tries forms of output in processes that may be lost, before an engine compiles them.

Some small grammars take a compiler hours, or more stack than a thread has: patterns that are
intersected, thousands of references in a chain. A thread can't be ended and a crash ends its
process, so a form that a client sent is compiled first where both cost nobody else anything.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidRequestError, UnavailableError
from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.runtime import grammar_compiler
from mini_infer.runtime.grammar_compiler import GrammarCompiler, GrammarError, Spec
from mini_infer.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PROGRAM = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from mini_infer.runtime.grammar_trials import main; main()"
)
PATIENCE_SECONDS = 30.0
"""For a verdict, when other forms are tried first."""
START_SECONDS = 60.0
"""For a new process, which reads the vocabulary."""
CRASHED = "is too complex: its compiler gave up"


class GrammarTrials(GrammarCompiler):
    """``check`` and ``compiled`` of a ``GrammarCompiler``, for a server: it has no grammars itself.

    A form that takes longer than ``COMPILE_SECONDS``, or crashes, costs the process that tried it;
    the next form gets another one.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._config = config
        self._idle: queue.SimpleQueue[_Trial] = queue.SimpleQueue()
        self._all: set[_Trial] = set()
        self._closed = False

    def close(self) -> None:
        """Ends the processes; what is being tried fails. Idempotent, on whatever thread."""
        self._closed = True
        if "_threads" in self.__dict__:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._all):
            trial.kill()

    def _compile(self, spec: Spec) -> Any:
        """On a thread of ``_threads``: there are never more processes than those are."""
        trial = self._take()
        try:
            verdict = trial.ask(spec)
        except BaseException:
            self._all.discard(trial)
            trial.kill()
            raise
        self._idle.put(trial)
        if verdict is not None:
            raise GrammarError(*verdict)
        return None

    def _take(self) -> "_Trial":
        with contextlib.suppress(queue.Empty):
            while True:
                trial = self._idle.get_nowait()
                if trial.is_alive:
                    return trial
                self._all.discard(trial)
        try:
            trial = _Trial(self._config, self._tokenizer)
        except OSError as error:
            raise UnavailableError(f"no process can be started to check a form: {error}") from None
        self._all.add(trial)
        if self._closed:
            trial.kill()
        return trial

    def _drop(self, future: "Future[Any]") -> None:
        """What has not been begun is given up: a client that hangs up leaves its form behind, and
        as many may wait as are kept."""
        future.cancel()

    def _patience(self) -> float:
        return PATIENCE_SECONDS

    def _unfinished(self, params: StructuredOutputsParams) -> Exception:
        return UnavailableError(
            "the forms of many requests are being checked: send this one again after a moment"
        )


class _Trial:
    """A process that compiles, and the end of a pipe to it. It ends with this process."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        from multiprocessing.connection import Pipe  # not at a server's start

        self._pipe, its_pipe = Pipe()
        with its_pipe:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(its_pipe.fileno()), "\n".join(sys.path)],
                    pass_fds=[its_pipe.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # of a crash; the caller is told
                    start_new_session=True,  # Ctrl-C is the server's
                )
            except OSError:
                self._pipe.close()
                raise
        self._send: Callable[[Any], None] = self._pipe.send
        self._hello: tuple[Any, ...] | None = (config, tokenizer)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, spec: Spec) -> tuple[str, str] | None:
        """None, or what is wrong with a form and where. Raises GrammarError if it is too complex"""
        seconds = grammar_compiler.COMPILE_SECONDS
        try:
            if self._hello is not None:
                self._send(self._hello)
                self._hello = None
                if not self._pipe.poll(START_SECONDS):
                    raise UnavailableError("the process that checks forms does not start")
                self._pipe.recv()
            self._send(spec)
            if not self._pipe.poll(seconds):
                raise GrammarError(
                    f"is too complex: it took longer than {seconds:g} seconds to compile"
                )
            verdict: tuple[str, str] | None = self._pipe.recv()
        except (EOFError, OSError):
            raise GrammarError(CRASHED) from None
        return verdict

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    """The process: an engine's configuration and tokenizer, then forms, one after the other."""
    from multiprocessing.connection import Connection

    pipe = Connection(int(sys.argv[1]))
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, received), daemon=True).start()
    grammars = GrammarCompiler(*received.get())
    pipe.send(None)
    while True:
        pipe.send(_verdict(grammars, received.get()))


def _receive(pipe: "Connection", received: "queue.SimpleQueue[Any]") -> None:
    """Ends the process, whatever it compiles, when its parent has gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            received.put(pipe.recv())
    os._exit(0)


def _verdict(grammars: GrammarCompiler, spec: Spec) -> tuple[str, str] | None:
    try:
        grammars.compile_alone(spec)
    except GrammarError as error:
        return error.problem, error.within
    except InvalidRequestError as error:
        return str(error), ""
    except BaseException:  # a panic in Rust is no Exception
        return CRASHED, ""
    return None
