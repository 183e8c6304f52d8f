"""What the last stage of a pipeline samples, and the first one has to begin with.

From device to device: the host may plan, pack and launch a step meanwhile, and need not know yet.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.batch import IN_FLIGHT, ScheduledBatch
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.step_layout import Integers
from mini_infer.modeling.upload import to_device
from mini_infer.parallel.pipeline import StageLink


def sampled_places(batch: ScheduledBatch) -> tuple[Integers, Integers]:
    """Slots ``[S]``, and positions in their rows, of the tokens that a step without drafts samples;
    none of one that is run for its time or memory only: no other step will begin with them."""
    is_real = batch.step_id >= 0
    places = [
        (chunk.slot, chunk.num_computed_tokens + chunk.num_new_tokens)
        for chunk in batch.chunks
        if chunk.samples and is_real
    ]
    slots, positions = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return slots, positions


class FeedingStage:
    """The last stage's end of it."""

    def __init__(self, state: DeviceState, link: StageLink) -> None:
        self._state, self._link = state, link

    def feed(self, batch: ScheduledBatch) -> None:
        """Sends what a step sampled, or would have sampled if it had not failed."""
        table = self._state.token_table
        slots, positions = sampled_places(batch)
        if len(slots):
            places = to_device(slots * table.shape[1] + positions, table.device)
            self._link.feed_back(table.view(-1).index_select(0, places))


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a step will bring."""

    number: int
    slots: Integers
    positions: Integers


class FedStage:
    """The first stage's end of it."""

    def __init__(self, state: DeviceState, link: StageLink, num_stages: int) -> None:
        self._state, self._link, self._num_stages = state, link, num_stages
        self._num_steps = 0
        self._expected: deque[_Expected] = deque()
        self._sampled: dict[int, int] = {}
        """Slot to the last step that samples for it."""
        self._admitted: dict[int, int] = {}
        """Slot to the step that brought its request."""

    def take_in(self, batch: ScheduledBatch) -> None:
        """Before a step is taken in: receives all that its chunks start with, and what is there in
        any case."""
        needed = self._num_steps - self._num_stages
        for chunk, token_id in zip(batch.chunks, batch.first_token_ids, strict=False):
            if token_id == IN_FLIGHT:
                needed = max(needed, self._sampled[chunk.slot])
        while self._expected and self._expected[0].number <= needed:
            self._receive(self._expected.popleft())

    def expect(self, batch: ScheduledBatch) -> None:
        """Behind a step: notes what it will bring."""
        for admission in batch.admissions:
            self._admitted[admission.slot] = self._num_steps
        slots, positions = sampled_places(batch)
        if len(slots):
            self._sampled.update(dict.fromkeys(slots.tolist(), self._num_steps))
            self._expected.append(_Expected(self._num_steps, slots, positions))
        self._num_steps += 1

    def _receive(self, step: _Expected) -> None:
        """What is for a request that ended meanwhile goes to nobody's row: another one may have its
        slot."""
        table, slots = self._state.token_table, step.slots
        token_ids = torch.empty(len(slots), dtype=table.dtype, device=table.device)
        gone = [self._admitted.get(slot, -1) > step.number for slot in slots.tolist()]
        slots = np.where(gone, self._state.null_slot, slots)
        places = to_device(slots * table.shape[1] + step.positions, table.device)
        table.view(-1).index_copy_(0, places, self._link.receive_tokens_(token_ids))


def write_first_tokens(state: DeviceState, batch: ScheduledBatch) -> None:
    """Writes those of the tokens that chunks start with that the host knows."""
    table = state.token_table
    known = [
        (chunk.slot * table.shape[1] + chunk.num_computed_tokens, token_id)
        for chunk, token_id in zip(batch.chunks, batch.first_token_ids, strict=False)
        if token_id != IN_FLIGHT
    ]
    if known:
        packed: Tensor = to_device(np.array(known, dtype=np.int64).T.copy(), table.device)
        places, token_ids = packed
        table.view(-1).index_copy_(0, places, token_ids.to(table.dtype))
