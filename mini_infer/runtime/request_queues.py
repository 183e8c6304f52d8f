"""The scheduler's four queues: waiting, prefilling, decoding, preempted."""

import heapq

from mini_infer.core.request import Request, RequestState
from mini_infer.runtime.policy import SchedulingPolicy


class RequestQueues:
    """Requests by state. Outside are ``waiting`` and ``preempted``, inside, with a slot and blocks,
    ``prefilling`` and ``decoding``."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heaps: dict[RequestState, list[tuple[tuple[int, ...], int, Request]]] = {
            RequestState.WAITING: [],
            RequestState.PREEMPTED: [],
        }
        self._inside: dict[RequestState, dict[str, Request]] = {
            RequestState.PREFILLING: {},
            RequestState.DECODING: {},
        }
        self._counts = dict.fromkeys(RequestState, 0)

    def count(self, state: RequestState) -> int:
        return self._counts[state]

    @property
    def num_running(self) -> int:
        return self._counts[RequestState.PREFILLING] + self._counts[RequestState.DECODING]

    @property
    def num_unfinished(self) -> int:
        return self.num_running + self.num_outside

    @property
    def num_outside(self) -> int:
        return self._counts[RequestState.WAITING] + self._counts[RequestState.PREEMPTED]

    def add(self, request: Request) -> None:
        """Enters a new request as waiting."""
        self._insert(request, RequestState.WAITING)

    def move(self, request: Request, state: RequestState) -> None:
        """Takes the request out of its queue and into the one of ``state``."""
        if request.state is state:
            return
        self._counts[request.state] -= 1
        if request.state in self._inside:
            del self._inside[request.state][request.request_id]
        elif self._heaps[request.state][0][-1] is request:
            heapq.heappop(self._heaps[request.state])
        self._insert(request, state)

    def _insert(self, request: Request, state: RequestState) -> None:
        request.state = state
        if state is RequestState.FINISHED:
            return
        self._counts[state] += 1
        if state in self._inside:
            self._inside[state][request.request_id] = request
        else:
            heapq.heappush(
                self._heaps[state], (self._policy.key(request), request.arrival, request)
            )

    def running(self, state: RequestState) -> list[Request]:
        """Prefilling or decoding requests in the policy's order."""
        return sorted(self._inside[state].values(), key=self._policy.key)

    def next_outside(self) -> Request | None:
        """The first of the preempted and waiting requests."""
        heads = []
        for state, heap in self._heaps.items():
            while heap and heap[0][-1].state is not state:  # aborted while it waited
                heapq.heappop(heap)
            heads += heap[:1]
        return min(heads)[-1] if heads else None
