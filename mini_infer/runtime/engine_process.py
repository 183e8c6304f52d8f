"""An engine in a process of its own, as the server's process sees it: start, talk, end."""

import contextlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mini_infer.core.errors import EngineDeadError
from mini_infer.runtime.silence import HUNG_EXIT_CODE, LOOK_SECONDS, PAGE, Silence, shared_memory

if TYPE_CHECKING:
    from mini_infer.core.engine_config import EngineConfig
    from mini_infer.runtime.engine_messages import Link, ToEngine, ToServer

PROGRAM = (
    # First of all: the working directory, which "-c" puts there, may hide modules.
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from mini_infer.runtime.engine_main import main; main()"
)
MAX_STEPS_BEHIND = 16
"""Messages that wait on the server's side, beside those on the engine's (``MAX_STEPS_AHEAD``)."""
STOP_GRACE = 3.0
"""Seconds that an engine that was told to stop may take, before it is killed."""
POLL_MS = 50
STOP_POLL_MS = 5
KILL_SECONDS = 2.0
"""After which a killed process is left to the system: a driver's call may hold it."""
HUNG = "hung (no sign of life for {:.0f} s)"
MAX_FOLDER_BYTES = 70
THREADS = {"GOMP_SPINCOUNT": "10000"}
"""Torch's threads on a CPU wait for each other in a loop, and where the server's process has one of
their cores meanwhile, a step took up to seven times as long: after microseconds they sleep."""


class EngineHost(Protocol):
    """Where an ``EngineCore`` runs, loaded, at the other end of a link."""

    config: "EngineConfig"
    link: "Link[ToEngine, ToServer]"

    def wait(self) -> str:
        """Waits, on whatever thread, until it has ended, which it is made to if it hangs; returns
        how, in words."""
        ...

    def close(self) -> None:
        """Ends it, whatever it does, and frees what it took; harmless when called twice."""
        ...


class EngineProcess:
    """Implements ``EngineHost``.

    A new interpreter and no fork: neither threads nor a device's state could be taken over. It gets
    a session of its own, so that a terminal's Ctrl-C reaches the server only, and a pipe as its
    standard input, which ends with this process.
    """

    config: "EngineConfig"
    link: "Link[ToEngine, ToServer]"

    def __init__(
        self, options: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts the process, to build an engine from option names of ``EngineConfig``. That takes
        a while: do something else before ``locate``. ``environment`` has variables of its own."""
        # For this user only. The path of a socket has some 100 bytes.
        is_long = len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES
        self._folder = tempfile.mkdtemp(prefix="mini-infer-", dir="/tmp" if is_long else None)
        self._endpoint = f"ipc://{self._folder}/engine"
        page = shared_memory(PAGE.size)
        self._silence = Silence(mmap.mmap(page, PAGE.size))
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, self._endpoint, str(page), "\n".join(sys.path)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=(page,),
            env={**THREADS, **os.environ, **(environment or {})},
            start_new_session=True,
        )
        os.close(page)
        self._closing = threading.Lock()
        line = json.dumps(dict(options), default=str) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``locate`` tells of its end
            self._process.stdin.write(line.encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kills the process, from whatever thread, and leaves the rest to who waits for it."""
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def locate(self) -> Path | None:
        """Waits until the model is there, which may have to be fetched. Returns the folder of its
        tokenizer, for ``load_tokenizer``.

        Raises:
            MiniInferError: an option or the model can't be used.
            EngineDeadError: the process ended, without another word.
        """
        import zmq  # after the process was started, as are the messages

        from mini_infer.runtime.engine_messages import Located, to_engine

        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
            self.link = to_engine(socket)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # the event loop must not wait
            socket.setsockopt(zmq.RCVHWM, MAX_STEPS_BEHIND)
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._clean_up()
            raise EngineDeadError(
                f"no socket to the engine's process can be made in {self._folder}: {error}"
            ) from None
        message = self._next_message()
        assert isinstance(message, Located)
        return None if message.folder is None else Path(message.folder)

    def finish(self) -> "EngineConfig":
        """Waits until the engine is loaded; raises what ``locate`` does, and what loading does."""
        from mini_infer.runtime.engine_messages import Loaded

        message = self._next_message()
        assert isinstance(message, Loaded)
        self.config = message.config
        return message.config

    def _next_message(self) -> "ToServer":
        """Of an engine that is being loaded; where there is none, the process is cleared away."""
        from mini_infer.runtime.engine_messages import Failed

        try:
            while not self.link.socket.poll(POLL_MS):
                if self._process.poll() is not None and not self.link.readable:
                    raise EngineDeadError(
                        f"the engine's process {self.wait()} while it loaded the model; its "
                        f"output above may say why (often: too little memory)"
                    )
                if silence := self._silence.look():
                    raise EngineDeadError(
                        f"the engine's process {HUNG.format(silence)} while it loaded the model; "
                        f"its output above may say where"
                    )
            message = self.link.receive()
            if isinstance(message, Failed):
                raise message.failure.to_exception()
        except BaseException:
            self._clean_up()
            raise
        return message

    def wait(self) -> str:
        """Kills it where it gives no sign of life."""
        ended = threading.Event()
        threading.Thread(target=self._wait_for_end, args=(ended,), daemon=True).start()
        while not ended.wait(LOOK_SECONDS):
            if silence := self._silence.look():
                self._process.kill()
                ended.wait(KILL_SECONDS)
                return HUNG.format(silence)
        code = self._process.returncode
        if code == HUNG_EXIT_CODE:
            return "hung in a step"
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def _wait_for_end(self, ended: threading.Event) -> None:
        self._process.wait()
        ended.set()

    def close(self) -> None:
        from mini_infer.runtime.engine_messages import Stop

        with self._closing:
            if self.link.socket.closed:
                return
            if self._process.poll() is None:
                self.link.send(Stop())
                deadline = time.monotonic() + STOP_GRACE
                while self._process.poll() is None and time.monotonic() < deadline:
                    if self.link.socket.poll(STOP_POLL_MS):  # it may wait to be read
                        self.link.socket.recv()
            self._clean_up()

    def _clean_up(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(AttributeError):  # no link yet
            self.link.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineStarter:
    """Starts engines' processes from the same options, one after the other.

    The first one may be spawned ahead: an interpreter takes a while to come up. A context manager,
    which ends what was spawned and not started.
    """

    def __init__(
        self, options: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        """``environment`` has variables of these processes' own."""
        self.options = dict(options)
        self._environment = environment
        self._process: EngineProcess | None = None
        self._is_located = False
        self._cancelled = False

    def __enter__(self) -> "EngineStarter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def spawn(self) -> EngineProcess:
        """Starts a process for the next ``start``."""
        self._process = EngineProcess(self.options, self._environment)
        return self._process

    def locate(self) -> Path | None:
        """``EngineProcess.locate`` of the process for the next ``start``, which goes on loading."""
        process = self._process or self.spawn()
        if self._cancelled:
            process.kill()
        folder = process.locate()
        self._is_located = True
        return folder

    def start(self) -> EngineProcess:
        """A loaded engine; raises what ``EngineProcess.finish`` does. On whatever thread."""
        try:
            if not self._is_located:
                self.locate()
            process = self._process
            assert process is not None
            config = process.finish()
        finally:
            self._process, self._is_located = None, False
        if self._cancelled:
            process.close()
        # Another one has to have as many, as the server promised its callers that room.
        self.options["num_kv_blocks"] = config.num_kv_blocks
        return process

    def cancel(self) -> None:
        """Ends a ``start`` that is under way, with EngineDeadError, and what was spawned ahead."""
        self._cancelled = True
        process = self._process
        if process:
            process.kill()
