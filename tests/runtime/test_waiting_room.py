"""Choices are counted from the door to their first step, wherever they leave the way."""

import pytest

from mini_infer.core.errors import UnavailableError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.waiting_room import WaitingRoom


def test_choices_wait_from_the_door_to_their_first_step() -> None:
    engine = LLMEngine.from_options(dry_run=True, max_num_seqs=2)
    room = WaitingRoom(engine.events, limit=9)
    room.enter(4)
    assert room.num_waiting == 4
    engine.add_request("a", "Hello", SamplingParams(n=4, max_tokens=2, ignore_eos=True))
    assert room.num_waiting == 4
    engine.step()
    assert room.num_waiting == 2
    while engine.has_unfinished():
        engine.step()
    assert room.num_waiting == 0


def test_who_is_aborted_waits_no_longer() -> None:
    engine = LLMEngine.from_options(dry_run=True)
    room = WaitingRoom(engine.events, limit=9)
    room.enter(3)
    engine.add_request("a", "Hello", SamplingParams(n=3))
    assert room.num_waiting == 3
    engine.abort("a")
    assert room.num_waiting == 0


def test_one_too_many_is_told_to_come_again() -> None:
    room = WaitingRoom(LLMEngine.from_options(dry_run=True).events, limit=3)
    room.enter(2)
    room.check()
    with pytest.raises(UnavailableError, match="2 choices wait and at most 3"):
        room.enter(2)
    room.enter(1)
    with pytest.raises(UnavailableError):
        room.check()
    room.leave(1)
    room.check()


def test_an_empty_room_takes_what_is_too_much_at_any_time() -> None:
    room = WaitingRoom(LLMEngine.from_options(dry_run=True).events, limit=3)
    room.enter(5)
    with pytest.raises(UnavailableError):
        room.enter(1)
