"""What a proposer on the device is."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from mini_infer.core.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class DraftRows:
    """R requests that a step has just sampled for; all tensors stay on the device.

    Attributes:
        slots: ``[R]`` int64, each request's row of the device state.
        positions: ``[R]`` int64, where its last token stands: sampled, and not yet an input.
        token_ids: ``[R]`` int64, those tokens.
        hidden: ``[R, hidden]``, the target's residual stream at the token before.
    """

    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    hidden: Tensor


class DeviceProposer(Protocol):
    """Guesses what comes next, without asking the host: what it launches may be replayed as a CUDA
    graph.

    A user's own is a class with ``on_device = True``. It is built with ``(config: EngineConfig,
    model: CausalLM, caches: Sequence[KVCache], state: DeviceState)``, once all of these are there.
    """

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        """Drafts ``[R, num_drafts]`` int64 for the tokens behind ``positions``."""
        ...


@runtime_checkable
class FollowingProposer(DeviceProposer, Protocol):
    """One that has to see all steps, as it keeps something of every token."""

    def follow(self, batch: ScheduledBatch) -> None:
        """Called in every step, once the tables of the device state have its tokens and blocks, and
        before ``propose``. Never part of a CUDA graph."""
        ...
