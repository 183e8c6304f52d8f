"""What crosses the border between an engine and the ranks that run its steps: msgspec over ZeroMQ.

::

    engine                                                 every rank
      Load, Profile, Prepare, Measure, Run, Sample, Stop ──►
          ◄── Up, Done, Costs, Result (of one rank), StepFailed, Failed

All ranks get the same messages in the same order, and nobody decides but the engine.
"""

import msgspec

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.outputs import StepOutput
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.engine_messages import Failure


class Load(msgspec.Struct, tag=True, array_like=True):
    """Meet the other ranks, and load the part of the model."""

    config: EngineConfig
    folder: str
    weights: str


class Profile(msgspec.Struct, tag=True, array_like=True):
    """Say how many KV blocks fit."""


class Prepare(msgspec.Struct, tag=True, array_like=True):
    """Make the KV cache, and record graphs."""

    num_blocks: int


class Measure(msgspec.Struct, tag=True, array_like=True):
    """Say what steps with drafts take."""


class Run(msgspec.Struct, tag=True, array_like=True):
    """Run a step. After one that failed all of its ``epoch`` are refused: they build on it."""

    number: int
    epoch: int
    batch: ScheduledBatch


class Sample(msgspec.Struct, tag=True, array_like=True):
    """Sample the last step, which waits for these masks."""

    number: int
    epoch: int
    masks: bytes


class Stop(msgspec.Struct, tag=True, array_like=True):
    """End."""


ToRank = Load | Profile | Prepare | Measure | Run | Sample | Stop


class Up(msgspec.Struct, tag=True, array_like=True):
    """The process runs."""

    rank: int


class Done(msgspec.Struct, tag=True, array_like=True):
    """``Load``, ``Profile`` or ``Prepare`` is done; after ``Profile``, blocks that fit."""

    rank: int
    num_blocks: int = 0


class Costs(msgspec.Struct, tag=True, array_like=True):
    """What ``Measure`` found."""

    rank: int
    costs: StepCosts | None


class Result(msgspec.Struct, tag=True, array_like=True):
    """What a step brought: the same on every rank, so one tells."""

    number: int
    output: StepOutput


class StepFailed(msgspec.Struct, tag=True, array_like=True):
    """A step raised. If it does on every rank, it is a request's fault, and all go on."""

    rank: int
    number: int
    failure: Failure


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The rank ends; ``lost_another`` where it noticed that another one is gone."""

    rank: int
    failure: Failure
    lost_another: bool


FromRank = Up | Done | Costs | Result | StepFailed | Failed
