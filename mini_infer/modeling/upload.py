"""Small host arrays on their way to the device, without waiting for it."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of ``values`` on ``device``; on a CPU it shares their memory.

    A copy from pageable memory would wait for all that the device has still to do. Pinned memory
    comes from torch's cache, which reuses it only when its copy is over.
    """
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def copy_to_device(values: NDArray[Any], target: Tensor) -> None:
    """Writes ``values`` into ``target``, a device tensor of their shape, without waiting."""
    host = torch.from_numpy(values)
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)
