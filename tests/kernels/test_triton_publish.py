"""What a decode step leaves for the host and for the next step, against the reference."""

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton")
kernels = pytest.importorskip("mini_infer.kernels.triton.publish")

NULL_SLOT = 700


def host_memory(rows: int, columns: int) -> Tensor:
    on_gpu = DEVICE.type == "cuda"
    return torch.full((rows, columns), -1, dtype=torch.int64, pin_memory=on_gpu)


@pytest.mark.parametrize("num_rows", [1, 3, 600])
def test_steps_in_turn(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    slots = torch.randint(0, NULL_SLOT, (num_rows,), generator=generator)
    slots[num_rows - num_rows // 3 :] = NULL_SLOT
    inputs = torch.stack((slots, torch.arange(num_rows)))
    expected = inputs.clone(), torch.full((3, 650), -1), torch.zeros(1, dtype=torch.int64)
    found = inputs.to(DEVICE), host_memory(3, 650), torch.zeros_like(expected[2], device=DEVICE)
    for _ in range(5):
        token_ids = torch.randint(0, 10**6, (num_rows,), generator=generator)
        for publish_, ids, (rows, results, turn) in (
            (reference.publish_, token_ids, expected),
            (kernels.publish_, token_ids.to(DEVICE), found),
        ):
            publish_(ids, *rows, NULL_SLOT, results, turn)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
