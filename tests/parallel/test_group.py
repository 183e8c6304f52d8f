"""Collectives between processes: right, and bitwise the same on every rank."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mini_infer.parallel.group import SINGLE, side_by_side

pytestmark = pytest.mark.processes

SIZE = 2
PROGRAM = """
import hashlib, sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
from mini_infer.parallel.group import join_ranks
from mini_infer.parallel.rendezvous import FolderRendezvous

rank, size = int(sys.argv[1]), {size}
group = join_ranks(rank, size, torch.device("cpu"), FolderRendezvous(Path(sys.argv[2])))
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for count in (1, 7, 4099):
        seeded = [torch.Generator().manual_seed(i) for i in range(size)]
        parts = [torch.randn(count, 5, generator=generator).to(dtype) for generator in seeded]
        total = group.all_reduce_(parts[rank].clone())
        assert torch.allclose(total.float(), sum(part.float() for part in parts), atol=0.05)
        gathered = group.all_gather_columns(parts[rank], 8)
        assert torch.equal(gathered, torch.cat(parts, dim=1)[:, :8])
        for result in (total, gathered):
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
ids = torch.full((2, 3), 5 + rank)
assert group.broadcast_(ids).unique().tolist() == [5]
assert group.slowest(0.5 + rank) == 0.5 + size - 1
group.close()
group.close()
print(digest.hexdigest())
"""


def test_all_ranks_get_the_same_bits(tmp_path: Path) -> None:
    """Whatever port the environment names, and although it is taken."""
    taken = socket.create_server(("127.0.0.1", 0))
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
    program = PROGRAM.format(path=sys.path, size=SIZE)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **port},
        )
        for rank in range(SIZE)
    ]
    said = {rank.communicate(timeout=60)[0].strip() for rank in ranks}
    assert all(rank.returncode == 0 for rank in ranks)
    assert len(said) == 1
    taken.close()


def test_one_rank_has_nobody_to_ask() -> None:
    x = torch.randn(2, 4)
    assert SINGLE.all_reduce_(x) is SINGLE.broadcast_(x) is x
    assert SINGLE.all_gather_columns(x, 4) is x
    out = torch.empty(2, 4)
    assert SINGLE.all_gather_columns(x, 4, out) is out
    assert torch.equal(out, x)
    assert SINGLE.slowest(1.5) == 1.5
    SINGLE.close()


@pytest.mark.parametrize("num_columns", [4, 5, 8, 9, 12])
def test_columns_side_by_side(num_columns: int) -> None:
    """Of the last parts some columns may be surplus, or all."""
    parts = torch.randn(3, 2, 4)
    expected = torch.cat(list(parts), dim=1)[:, :num_columns]
    assert torch.equal(side_by_side(parts, num_columns), expected)
    assert side_by_side(parts, num_columns).is_contiguous()
    out = torch.empty(2, num_columns)
    assert side_by_side(parts, num_columns, out) is out
    assert torch.equal(out, expected)
