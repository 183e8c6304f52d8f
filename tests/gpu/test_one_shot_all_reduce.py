"""The one-shot all-reduce between two GPUs, a process each: values, replays under delays, and a
rank that never comes."""

import os
import random
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from mini_infer.kernels.triton.norm import rms_norm
from mini_infer.kernels.triton.one_shot_all_reduce import MAX_POLLS, sum_over_ranks
from mini_infer.parallel.symmetric_memory import Mailboxes, open_mailboxes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SIZE = 896
MOST_ROWS = 3000
NUM_REPLAYS = 1500
CYCLES = 400_000
"""Some 200 microseconds: many times what a call takes."""
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ONE_STEP = 2**-7
"""Between two neighbours of bfloat16, of their size."""
EPS = 1e-6


def run_ranks(check: str, folder: Path) -> None:
    """``check`` of this file in two processes; its assertions are theirs."""
    program = (
        "import sys; from tests.gpu import test_one_shot_all_reduce as t; t.enter(*sys.argv[1:])"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, check, str(rank), str(folder)])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def enter(check: str, rank: str, folder: str) -> None:
    device = torch.device("cuda", int(rank))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        store=FileStore(f"{folder}/ranks", 2),
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    globals()[check](int(rank), device)
    os._exit(0)  # without farewells: the other rank may be gone


def opened(dtype: torch.dtype, device: torch.device) -> Mailboxes:
    boxes = open_mailboxes(SIZE, dtype, MOST_ROWS, device)
    assert boxes is not None
    return boxes


def random_values(*shape: int, device: torch.device, seed: int) -> Tensor:
    """The same on both ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> None:
    """What is allocated next is full of NaN."""
    held = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(4)]
    del held


def check_values(rank: int, device: torch.device) -> None:
    for dtype, tolerance in TOLERANCE.items():
        boxes = opened(dtype, device)
        weight = random_values(SIZE, device=device, seed=1).to(dtype)
        for num_rows in (1, 2, 3, 7, 8, 33, 64, 65, 130, 600, MOST_ROWS):
            for has_residual, has_norm in ((True, True), (True, False), (False, True)):
                parts = random_values(2, num_rows, SIZE, device=device, seed=num_rows).to(dtype)
                start = random_values(num_rows, SIZE, device=device, seed=2).to(dtype)
                residual = start.clone() if has_residual else None
                part = parts[rank].clone()
                poison(num_rows, SIZE, dtype=dtype, device=device)
                norm = (weight, EPS) if has_norm else None
                places = boxes.addresses, boxes.turns, rank
                out, normed = sum_over_ranks(part, residual, norm, *places)
                exact = parts.double().sum(0) + (start.double() if has_residual else 0)
                assert (out.double() - exact).norm() / exact.norm() < tolerance
                both = out.new_empty(2, num_rows, SIZE)
                dist.all_gather_into_tensor(both.flatten(0, 1), out)
                assert torch.equal(both[0], both[1])
                if normed is not None:
                    wanted = rms_norm(out.double(), weight.double(), EPS)
                    assert (normed.double() - wanted).norm() / wanted.norm() < tolerance
        torch.cuda.synchronize()
        dist.barrier()
        assert (boxes.memory[0].view(torch.uint8) == 0xFF).all()


def check_replays(rank: int, device: torch.device) -> None:
    """Thousands of calls of various sizes, each with other values, now one rank late, now the
    other, and sometimes by several steps of its host."""
    boxes = opened(torch.bfloat16, device)
    values = random_values(2, 61, 64, SIZE, device=device, seed=3).bfloat16()
    start = random_values(64, SIZE, device=device, seed=4).bfloat16()
    weight = random_values(SIZE, device=device, seed=5).bfloat16()
    turn, num_wrong = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))

    def step() -> None:
        for call, num_rows in enumerate((1, 64, 2, 7, 1, 1, 33, 4)):
            turn.add_(1)
            parts = values.index_select(1, turn % values.shape[1])[:, 0, :num_rows]
            expected = (parts[0].float() + parts[1].float() + start[:num_rows].float()).bfloat16()
            norm = (weight, EPS) if call % 2 else None
            places = boxes.addresses, boxes.turns, rank
            residual = start[:num_rows].clone()
            out, normed = sum_over_ranks(parts[rank].clone(), residual, norm, *places)
            num_wrong.add_((out != expected).sum())
            if normed is not None:
                wanted = rms_norm(expected, weight, EPS)  # may add up squares in another order
                num_wrong.add_(((normed - wanted).abs() > wanted.abs() * ONE_STEP).sum())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    chance = random.Random(rank)
    for _ in range(NUM_REPLAYS):
        if chance.random() < 0.3:
            torch.cuda._sleep(chance.randrange(CYCLES))
        if chance.random() < 0.02:
            torch.cuda.synchronize()
        graph.replay()
    assert num_wrong.item() == 0


def check_alone(rank: int, device: torch.device) -> None:
    """A rank whose other one has ended gives up in the end, with an error."""
    boxes = opened(torch.bfloat16, device)
    if rank == 1:
        return
    part = torch.ones(1, SIZE, dtype=torch.bfloat16, device=device)
    places = boxes.addresses, boxes.turns, rank
    sum_over_ranks(part, None, None, *places, max_polls=MAX_POLLS // 2**8)
    with pytest.raises(RuntimeError, match="launch failure"):
        torch.cuda.synchronize()
    os._exit(0)  # nothing that this process would now tidy up can still be reached


@pytest.mark.parametrize("check", ["check_values", "check_replays", "check_alone"])
def test_two_ranks(check: str, tmp_path: Path) -> None:
    run_ranks(check, tmp_path)
