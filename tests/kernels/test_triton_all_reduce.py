"""The one-shot all-reduce against sums in float64. The ranks are all here, and take their turns one
after the other: each finds the others' parts in its mailboxes, as if they had been quicker.

Then they are processes, whose mailboxes are a file that all of them map, and wait for each other.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton")
one_shot = pytest.importorskip("mini_infer.kernels.triton.one_shot_all_reduce")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
WORDS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
MAX_ROWS = 4
EPS = 1e-5
POLLS = 3
"""Nobody comes later: a rank that waits has missed something."""
NUM_PROCESSES, NUM_CALLS, SIZE = 2, 30, 32
PROCESS = """
import random, sys, time
sys.path[:0] = {path!r}
import torch
from mini_infer.kernels.reference import rms_norm
from mini_infer.kernels.triton.one_shot_all_reduce import sum_over_ranks

rank, num_ranks, max_rows, size = int(sys.argv[1]), {num_ranks}, {max_rows}, {size}
shape = num_ranks, 2, max_rows, num_ranks - 1, size
boxes = torch.from_file(sys.argv[2], True, torch.Size(shape).numel(), dtype=torch.int32)
boxes = boxes.view(shape)
places = torch.tensor([own.data_ptr() for own in boxes]), torch.zeros(max_rows, dtype=torch.int32)
weight, haste, sizes = torch.ones(size), random.Random(rank), random.Random(0)
for call in range({num_calls}):
    torch.manual_seed(call)
    parts = torch.randn(num_ranks, sizes.randint(1, max_rows), size)
    time.sleep(haste.choice([0, 0, 0.01]))
    total, normed = sum_over_ranks(parts[rank], None, (weight, 1e-6), *places, rank, 2**20)
    assert torch.allclose(total, parts.sum(0), atol=1e-5), call
    assert torch.allclose(normed, rms_norm(total, weight, 1e-6), atol=1e-5), call
assert (boxes[rank] == -1).all()
"""


class Ranks:
    """Each with the mailboxes of ``parallel.symmetric_memory``, and its own turns."""

    def __init__(self, num_ranks: int, size: int, dtype: torch.dtype) -> None:
        shape = num_ranks, 2, MAX_ROWS, num_ranks - 1, size
        self.boxes = torch.full(shape, -1, dtype=WORDS[dtype], device=DEVICE)
        self.addresses = torch.tensor([boxes.data_ptr() for boxes in self.boxes], device=DEVICE)
        self.turns = torch.zeros(num_ranks, MAX_ROWS, dtype=torch.int32, device=DEVICE)
        self.turn = [0] * MAX_ROWS

    def box(self, owner: int, sender: int, row: int, boxes: Tensor | None = None) -> Tensor:
        """``[size]``: what ``owner`` has of ``sender``. No rank sends itself anything."""
        boxes = self.boxes if boxes is None else boxes
        return boxes[owner, self.turn[row], row, sender - (sender > owner)]

    def run(
        self,
        rank: int,
        parts: Tensor,
        residual: Tensor | None = None,
        norm: reference.Norm | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """A call of ``rank``, with what the others have sent or will send."""
        words = parts.view(WORDS[parts.dtype])
        num_ranks, num_rows = parts.shape[:2]
        for other in set(range(num_ranks)) - {rank}:
            for row in range(num_rows):
                self.box(rank, other, row).copy_(words[other, row])
        places = self.addresses, self.turns[rank], rank, POLLS
        return one_shot.sum_over_ranks(parts[rank].clone(), residual, norm, *places)  # type: ignore[no-any-return]

    def check_sent(self, rank: int, parts: Tensor) -> None:
        """``rank`` has written its part to all others, emptied its own boxes, and nothing else."""
        words = parts.view(WORDS[parts.dtype])
        num_ranks, num_rows = parts.shape[:2]
        expected = torch.full_like(self.boxes, -1)
        for other in set(range(num_ranks)) - {rank}:
            for row in range(num_rows):
                self.box(other, rank, row, expected).copy_(words[rank, row])
        assert torch.equal(self.boxes, expected)
        self.boxes.fill_(-1)  # as if the others had taken it out

    def end_turn(self, num_rows: int) -> None:
        for row in range(num_rows):
            self.turn[row] = 1 - self.turn[row]
        assert self.turns.tolist() == [self.turn] * len(self.turns)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[out.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 96), (3, 64), (4, 136)])
def test_turns_of_all_ranks(num_ranks: int, size: int, dtype: torch.dtype) -> None:
    """Rows come and go, so that their turns differ; with and without residual and norm."""
    ranks = Ranks(num_ranks, size, dtype)
    weight = random(size, dtype=dtype, seed=99)
    for call, num_rows in enumerate([1, 3, 2, 4, 4]):
        parts = random(num_ranks, num_rows, size, dtype=dtype, seed=call)
        start = random(num_rows, size, dtype=dtype, seed=50 + call) if call != 1 else None
        norm = (weight, EPS) if call != 2 else None
        wide_start = None if start is None else start.double()
        wide, _ = reference.sum_of_parts(parts.double(), wide_start)
        outs = []
        for rank in range(num_ranks):
            residual = None if start is None else start.clone()
            out, normed = ranks.run(rank, parts, residual, norm)
            ranks.check_sent(rank, parts)
            outs.append(out)
            assert residual is None or out is residual
            assert_near(out, wide)
            assert (normed is None) == (norm is None)
            if normed is not None:
                scale = (out.double().pow(2).mean(1, keepdim=True) + EPS).rsqrt()
                assert_near(normed, out.double() * scale * weight.double())
        assert all(torch.equal(out, outs[0]) for out in outs)
        ranks.end_turn(num_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_part_that_looks_like_an_empty_mailbox(dtype: torch.dtype) -> None:
    """A NaN of that very pattern arrives as another one, and nobody waits for ever."""
    ranks = Ranks(2, 16, dtype)
    parts = random(2, 1, 16, dtype=dtype)
    parts.view(WORDS[dtype])[0, 0, 3] = -1
    out, _ = ranks.run(0, parts)
    sent = ranks.box(1, 0, 0).view(dtype)
    assert sent.isnan().nonzero().tolist() == out[0].isnan().nonzero().tolist() == [[3]]
    assert not (ranks.box(1, 0, 0) == -1).any()


def test_warps_take_two_vectors_a_thread() -> None:
    assert [one_shot.num_warps(2 * size) for size in (64, 1024, 4096, 16384)] == [1, 2, 8, 16]


@pytest.mark.processes
@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu has this between GPUs")
def test_processes_that_wait_for_each_other(tmp_path: Path) -> None:
    file = tmp_path / "mailboxes"
    file.write_bytes(b"\xff" * (NUM_PROCESSES * 2 * MAX_ROWS * (NUM_PROCESSES - 1) * SIZE * 4))
    program = PROCESS.format(
        path=sys.path,
        num_ranks=NUM_PROCESSES,
        max_rows=MAX_ROWS,
        size=SIZE,
        num_calls=NUM_CALLS,
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), str(file)])
        for rank in range(NUM_PROCESSES)
    ]
    assert [rank.wait(100) for rank in ranks] == [0] * NUM_PROCESSES
