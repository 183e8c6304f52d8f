"""What stages send each other, and how many messages may be under way before somebody waits."""

import subprocess
import sys
from pathlib import Path

import pytest

from mini_infer.core.engine_config import MAX_DEPTH

pytestmark = pytest.mark.processes

NUM_STAGES = 2
PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
from mini_infer.parallel.pipeline import join_stages
from mini_infer.parallel.rank_place import RankPlace
from mini_infer.parallel.rendezvous import FolderRendezvous

rank, size, count = int(sys.argv[1]), {size}, {count}
place = RankPlace(rank, 1, size)
group, link = join_stages(place, torch.device("cpu"), FolderRendezvous(Path(sys.argv[2])))
assert group.size == 1
assert link.slowest(0.5 + rank) == 0.5 + size - 1
steps = [torch.full((3, 2), float(step)) for step in range(count)]
tokens = [torch.full((2,), step) for step in range(count)]
if rank == 0:
    for step in steps:
        link.send(step)
    assert all(torch.equal(link.receive_tokens_(torch.empty_like(sent)), sent) for sent in tokens)
else:
    for sent in tokens:
        link.feed_back(sent)
    assert all(torch.equal(link.receive_(torch.empty_like(sent)), sent) for sent in steps)
"""


def test_both_ends_send_as_much_as_may_be_in_flight_before_either_receives(tmp_path: Path) -> None:
    program = PROGRAM.format(path=sys.path, size=NUM_STAGES, count=NUM_STAGES + MAX_DEPTH)
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), str(tmp_path)])
        for rank in range(NUM_STAGES)
    ]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0] * NUM_STAGES
    finally:
        for rank in ranks:
            rank.kill()
