"""What a rank tells its engine, and when it no longer does."""

from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
import zmq

from mini_infer.runtime.engine_messages import Failure
from mini_infer.runtime.rank_messages import Failed, FromRank, Load, Up
from mini_infer.runtime.rank_worker import EngineLink, RankWorker
from tests.runtime.fake_executor import make_config


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


def test_a_gpu_without_a_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's host may have one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = make_config(device="cuda", distributed_executor_backend="ray")
    link = Mock(receive=Mock(return_value=Load(config, "unused", "unused")))
    assert not RankWorker(1, 2, link, Mock(), Mock(), gpu=0).serve()
    match link.send.call_args.args:
        case (Failed(1, Failure("InvalidConfigError", message)),):
            assert "can't use GPUs" in message
        case told:
            raise AssertionError(told)
