"""Proposers of drafts with which one rank fails, or all do, in the middle of a step."""

import os
import signal

from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.proposer import DraftRows

FATAL_TOKEN = 77
"""A request that begins with it is one too many."""


class Faulty:
    """Proposes token 0, until there is a request whose first token is the fatal one."""

    on_device = True
    only_rank: int | None = 1

    def __init__(
        self, config: EngineConfig, model: CausalLM, caches: object, state: DeviceState
    ) -> None:
        self._rank, self._state = model.group.rank, state

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        firsts = self._state.token_table[rows.slots, 0]
        if bool((firsts == FATAL_TOKEN).any()) and self.only_rank in (None, self._rank):
            self.fail()
        return rows.token_ids.new_zeros(len(rows.slots), num_drafts)

    def fail(self) -> None:
        raise RuntimeError("it was told to")


class FailsOnOne(Faulty):
    pass


class FailsOnAll(Faulty):
    only_rank = None


class IsKilled(Faulty):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class IsStopped(Faulty):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Loops(Faulty):
    def fail(self) -> None:
        while True:
            pass


class NeverStarts:
    """In place of a rank's actor."""

    def __init__(self, rank: int, size: int) -> None:
        raise ModuleNotFoundError("No module named 'mini_infer'")

    def seat(self) -> None:
        pass
