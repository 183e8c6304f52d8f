"""The scheduler's four queues: waiting, prefilling, decoding, preempted."""

import heapq
from bisect import bisect_left

from mini_infer.core.request import Rank, Request, RequestState


class _RankedList:
    """Requests in order of their ranks. Order is kept and not made: every step asks for it."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        index = bisect_left(self._ranks, request.rank)
        self._ranks.insert(index, request.rank)
        self.requests.insert(index, request)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._ranks, request.rank)
        assert self.requests[index] is request, "a rank is unique and constant"
        del self._ranks[index], self.requests[index]


class RequestQueues:
    """Requests by state. Outside are ``waiting`` and ``preempted``, inside, with a slot and blocks,
    ``prefilling`` and ``decoding``."""

    def __init__(self) -> None:
        self._heaps: dict[RequestState, list[tuple[Rank, Request]]] = {
            RequestState.WAITING: [],
            RequestState.PREEMPTED: [],
        }
        self._inside = {
            RequestState.PREFILLING: _RankedList(),
            RequestState.DECODING: _RankedList(),
        }
        self._aside: list[Request] = []
        self._counts = dict.fromkeys(RequestState, 0)

    def count(self, state: RequestState) -> int:
        return self._counts[state]

    @property
    def num_running(self) -> int:
        return sum(len(queue.requests) for queue in self._inside.values())

    def add(self, request: Request) -> None:
        """Enters a new request as waiting."""
        self._insert(request, RequestState.WAITING)

    def move(self, request: Request, state: RequestState) -> None:
        """Takes the request out of its queue and into the one of ``state``."""
        if request.state is state:
            return
        self._counts[request.state] -= 1
        if request.state in self._inside:
            self._inside[request.state].remove(request)
        elif self._heaps[request.state][0][-1] is request:
            heapq.heappop(self._heaps[request.state])
        elif state is not RequestState.FINISHED:  # which never comes back: it may stay where it is
            self._heaps[request.state].remove((request.rank, request))
            heapq.heapify(self._heaps[request.state])
        self._insert(request, state)

    def _insert(self, request: Request, state: RequestState) -> None:
        request.state = state
        if state is RequestState.FINISHED:
            return
        self._counts[state] += 1
        if state in self._inside:
            self._inside[state].add(request)
        else:
            heapq.heappush(self._heaps[state], (request.rank, request))

    def running(self, state: RequestState) -> list[Request]:
        """Prefilling or decoding requests by rank: a list of the caller's own."""
        return self._inside[state].requests.copy()

    def last_running(self) -> Request | None:
        """The last in rank of all that are inside."""
        tails = [queue.requests[-1] for queue in self._inside.values() if queue.requests]
        return max(tails, key=lambda request: request.rank, default=None)

    def next_outside(self) -> Request | None:
        """The first of the preempted and waiting requests."""
        heads = []
        for state, heap in self._heaps.items():
            while heap and heap[0][-1].state is not state:  # aborted while it waited
                heapq.heappop(heap)
            heads += heap[:1]
        return min(heads)[-1] if heads else None

    def set_aside(self, request: Request) -> None:
        """Makes ``next_outside``, which ``request`` is, show the one after it."""
        heapq.heappop(self._heaps[request.state])
        self._aside.append(request)

    @property
    def num_set_aside(self) -> int:
        return len(self._aside)

    def bring_back(self) -> None:
        """Undoes every ``set_aside``."""
        for request in self._aside:
            heapq.heappush(self._heaps[request.state], (request.rank, request))
        self._aside.clear()
