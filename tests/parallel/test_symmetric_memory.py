"""How large mailboxes are. What goes through them is in tests/kernels and tests/gpu."""

import pytest

from mini_infer.parallel.symmetric_memory import mailbox_bytes, most_rows

STEP = 8192
ROW = 2 * 3584


@pytest.mark.parametrize(
    ("num_ranks", "row_bytes", "rows"),
    [
        (1, ROW, 0),
        (2, ROW, STEP),
        (2, 2 * 8192, STEP),
        (2, 4 * 8192, STEP // 2),
        (3, ROW, 292),
        (4, ROW, 195),
        (8, ROW, 83),
        (8, 16, STEP),
        (9, ROW, 0),
        (2, ROW + 2, 0),
    ],
)
def test_two_ranks_send_whole_steps_and_more_of_them_a_few_rows(
    num_ranks: int, row_bytes: int, rows: int
) -> None:
    assert most_rows(num_ranks, row_bytes, STEP) == rows
    assert mailbox_bytes(num_ranks, row_bytes, STEP) == 2 * rows * (num_ranks - 1) * row_bytes


def test_no_more_than_a_step() -> None:
    assert most_rows(2, ROW, 100) == most_rows(4, ROW, 100) == 100
