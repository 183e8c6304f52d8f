"""The engine's process: loads a model, then serves it to the process that started this one.

    python -c "..." ENDPOINT PAGE

``EngineProcess`` starts it; PAGE is the descriptor of a page that both map. The first line of
standard input has option names of ``EngineConfig``, as JSON. From then on standard input is the
parent's lifeline: it ends when the parent does, however that ends, and this process with it.
"""

import json
import mmap
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import zmq

from mini_infer.core.errors import DEBUG
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.engine_loop import EngineLoop
from mini_infer.runtime.engine_messages import (
    Failed,
    Failure,
    Link,
    Loaded,
    Located,
    ToEngine,
    ToServer,
    to_server,
)
from mini_infer.runtime.engine_pulse import Pulse
from mini_infer.runtime.grammar_compiler import GrammarCompiler
from mini_infer.runtime.resolve import load_tokenizer, locate_tokenizer, resolve_core
from mini_infer.runtime.silence import PAGE

MAX_STEPS_AHEAD = 16
"""Messages that wait for a server that is slower than its engine, before steps wait for it. Each
end's queue has as many; beyond that a server could not keep up with an abort."""
LAST_WORDS_MS = 1000
RECONNECT_MS = 5


def main() -> None:
    """Runs until the server says so, or is gone."""
    endpoint = sys.argv[1]
    folder = Path(endpoint.removeprefix("ipc://")).parent
    # Ctrl-C and a service manager's SIGTERM are the server's to obey: it tells us when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    pulse = Pulse(mmap.mmap(int(sys.argv[2]), PAGE.size))
    pulse.start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, MAX_STEPS_AHEAD)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.connect(endpoint)
    exit_code = _serve(options, to_server(socket), pulse)
    socket.close()
    context.term()
    sys.exit(exit_code)


def _serve(options: dict[str, Any], link: Link[ToServer, ToEngine], pulse: Pulse) -> int:
    try:
        folder = locate_tokenizer(options)
        link.send(Located(None if folder is None else str(folder)))
        config, executor = resolve_core(options)
        tokenizer = load_tokenizer(folder)
        # A grammar is compiled for a vocabulary; nothing else here knows of text.
        core = EngineCore(config, executor, grammars=GrammarCompiler(config, tokenizer))
        if not config.dry_run:
            core.freeze_heap()
    except Exception as error:
        if os.environ.get(DEBUG, "") not in ("", "0"):  # the server has the error's text only
            traceback.print_exc()
        link.send(Failed(Failure.of(error)))
        return 1
    pulse.watch(core)
    link.send(Loaded(core.config))
    try:
        EngineLoop(core, link, pulse).run()
    except Exception:  # which the log has, and the server
        return 1
    return 0


def _end_with_parent(folder: Path) -> None:
    """Nobody else is left to remove the socket, where the parent was killed."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
