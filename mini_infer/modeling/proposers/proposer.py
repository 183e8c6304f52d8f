"""What a proposer on the device is."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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
    graph. It is built once the target and its caches are there."""

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        """Drafts ``[R, num_drafts]`` int64 for the tokens behind ``positions``."""
        ...
