"""The program of a rank that fails in the middle of a step, where it was told to.

FAULTY_RANK=1 FAULT=loop python -c "..." FOLDER RANK SIZE
"""

import os
import sys

from mini_infer.core.batch import ScheduledBatch
from mini_infer.modeling.device_state import DeviceState
from mini_infer.runtime.rank_worker import main

FATAL_TOKEN = 77
"""A request that begins with it is one too many."""
FAULTY_RANK, FAULT = "FAULTY_RANK", "FAULT"
LOOP, FAIL = "loop", "fail"
take_in = DeviceState.take_in


def take_in_or_not(state: DeviceState, batch: ScheduledBatch) -> None:
    take_in(state, batch)
    if all(admission.token_ids[0] != FATAL_TOKEN for admission in batch.admissions):
        return
    while os.environ[FAULT] == LOOP:
        pass
    raise RuntimeError("it was told to")


def faulty_main() -> None:
    if sys.argv[2] == os.environ[FAULTY_RANK]:
        DeviceState.take_in = take_in_or_not  # type: ignore[method-assign]
    main()
