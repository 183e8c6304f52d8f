"""What a rank tells its engine, and when it no longer does."""

from pathlib import Path

import msgspec
import zmq

from mini_infer.runtime.rank_messages import FromRank, Up
from mini_infer.runtime.rank_worker import EngineLink


def test_a_result_after_the_farewell_is_dropped(tmp_path: Path) -> None:
    """A step may be in flight when a rank is told to stop, and its result comes from a thread."""
    engine = zmq.Context.instance().socket(zmq.PULL)
    reports = f"ipc://{tmp_path}/engine"
    engine.bind(reports)
    link = EngineLink(f"ipc://{tmp_path}/rank-0", reports)
    link.send(Up(0))
    assert engine.poll(2000)
    assert msgspec.msgpack.decode(engine.recv(), type=FromRank) == Up(0)
    link.close()
    link.send(Up(0))
    assert not engine.poll(0)
    engine.close()
