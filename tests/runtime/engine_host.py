"""An engine's host in this process: its core runs in a thread, behind the same kind of link."""

import itertools
import threading

import zmq

from mini_infer.runtime.async_engine import AsyncEngine
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.engine_loop import EngineLoop
from mini_infer.runtime.engine_main import MAX_STEPS_AHEAD
from mini_infer.runtime.engine_messages import Stop, to_engine, to_server
from mini_infer.runtime.engine_process import MAX_STEPS_BEHIND

NUMBERS = itertools.count()


class ThreadHost:
    """Implements ``EngineHost`` so that a test can reach into the core."""

    def __init__(self, core: EngineCore) -> None:
        self.config = core.config
        context = zmq.Context.instance()
        ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        endpoint = f"inproc://engine-{next(NUMBERS)}"
        theirs.setsockopt(zmq.SNDHWM, MAX_STEPS_AHEAD)
        theirs.setsockopt(zmq.RCVHWM, 0)
        theirs.bind(endpoint)
        ours.setsockopt(zmq.SNDHWM, 0)
        ours.setsockopt(zmq.RCVHWM, MAX_STEPS_BEHIND)
        ours.connect(endpoint)
        self.link = to_engine(ours)
        self._closing = threading.Lock()
        self._theirs = theirs
        self._core = core
        self._thread = threading.Thread(target=self._run, name="mini-infer-engine", daemon=True)
        self._thread.start()
        self.error: Exception | None = None

    def wait(self) -> str:
        self._thread.join()
        return "ended"

    def close(self) -> None:
        with self._closing:
            if not self.link.socket.closed:
                self.link.send(Stop())
                self._thread.join(30)
                assert not self._thread.is_alive()
                self.link.socket.close(0)

    def _run(self) -> None:
        try:
            EngineLoop(self._core, to_server(self._theirs)).run()
        except Exception as error:
            self.error = error
        finally:
            self._theirs.close(0)


def threaded(engine: LLMEngine, **options: object) -> AsyncEngine:
    """An ``AsyncEngine`` whose core is that of ``engine``; so are input processor and tokenizer."""
    hosts = [ThreadHost(engine.core)]
    async_engine = AsyncEngine(hosts, engine.tokenizer, **options)  # type: ignore[arg-type]
    async_engine.input_processor = engine.input_processor
    return async_engine
