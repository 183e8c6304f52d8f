"""What a launch needs to know about the device."""

import functools
from typing import Any

import torch

INTERPRETED_SMS = 4
INTERPRETED_SHARED_MEMORY = 227 * 1024


@functools.cache
def num_sms(device: torch.device) -> int:
    """Processors of a GPU; Triton's interpreter on a CPU gets a few, so that it splits too."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can share among its threads."""
    if device.type != "cuda":
        return INTERPRETED_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack this property
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Has the device programmatic dependent launch: a kernel that starts beside its predecessor?

    Such a kernel must wait (``gdc_wait``) before it reads what the predecessor writes.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << (value - 1).bit_length()
