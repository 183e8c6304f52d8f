"""Queues stay in order of rank, whatever comes and goes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.request import Request, RequestState
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.request_queues import RequestQueues

INSIDE = (RequestState.PREFILLING, RequestState.DECODING)
OUTSIDE = (RequestState.WAITING, RequestState.PREEMPTED)


def request_of(arrival: int, key: tuple[float, ...]) -> Request:
    request = Request(f"r{arrival}", [1], SamplingParams(), 0, 4, arrival=arrival)
    request.rank = (key, arrival)
    return request


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    moves=st.lists(st.tuples(st.integers(0, 19), st.sampled_from(RequestState)), max_size=60),
)
def test_queues_are_in_order_of_rank_after_any_moves(
    keys: list[int], moves: list[tuple[int, RequestState]]
) -> None:
    queues = RequestQueues()
    requests = [request_of(index, (key,)) for index, key in enumerate(keys)]
    for request in random.Random(0).sample(requests, len(requests)):
        queues.add(request)
    for index, state in moves:
        request = requests[index % len(requests)]
        # As in the scheduler: of those outside only the first gets in, and any may end.
        if request.state is RequestState.FINISHED or (
            request.state in OUTSIDE
            and state is not RequestState.FINISHED
            and queues.next_outside() is not request
        ):
            continue
        queues.move(request, state)
        by_rank = sorted(requests, key=lambda item: item.rank)
        for inside in INSIDE:
            expected = [item for item in by_rank if item.state is inside]
            assert queues.running(inside) == expected
            assert queues.count(inside) == len(expected)
        running = [item for item in by_rank if item.state in INSIDE]
        assert queues.num_running == len(running)
        assert queues.last_running() is (running[-1] if running else None)
        outside = [item for item in by_rank if item.state in OUTSIDE]
        assert queues.next_outside() is (outside[0] if outside else None)


def test_a_list_of_running_requests_is_the_callers_own() -> None:
    queues = RequestQueues()
    request = request_of(0, ())
    queues.add(request)
    queues.move(request, RequestState.DECODING)
    running = queues.running(RequestState.DECODING)
    queues.move(request, RequestState.PREEMPTED)
    assert running == [request]
    assert queues.running(RequestState.DECODING) == []


def test_who_is_set_aside_is_out_of_sight_until_brought_back() -> None:
    queues = RequestQueues()
    requests = [request_of(index, (index,)) for index in range(4)]
    for request in requests:
        queues.add(request)
    queues.move(requests[0], RequestState.DECODING)
    queues.move(requests[0], RequestState.PREEMPTED)
    for request in requests[:3]:
        assert queues.next_outside() is request
        queues.set_aside(request)
    assert queues.num_set_aside == 3
    assert queues.next_outside() is requests[3]
    queues.bring_back()
    assert queues.num_set_aside == 0
    for request in requests:
        assert queues.next_outside() is request
        queues.move(request, RequestState.DECODING)
    assert queues.next_outside() is None
