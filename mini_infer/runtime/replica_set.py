"""The engines of a server, replicas of one another, and the requests that they have."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from mini_infer.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    MiniInferError,
    SlowReaderError,
)
from mini_infer.runtime.delta_consumer import MAX_BACKLOG, Consumer
from mini_infer.runtime.engine_client import ServerEvents
from mini_infer.runtime.engine_messages import Add, Finish, News
from mini_infer.runtime.engine_process import EngineHost
from mini_infer.runtime.engine_restarts import Starter
from mini_infer.runtime.input_processor import ProcessedRequest
from mini_infer.runtime.output_processor import OutputProcessor
from mini_infer.runtime.replica import Replica
from mini_infer.runtime.replica_starters import common_config
from mini_infer.runtime.routing.dispatcher import Dispatcher
from mini_infer.runtime.routing.round_robin import RoundRobin
from mini_infer.runtime.routing.router import Router
from mini_infer.runtime.waiting_room import WaitingRoom

MAX_MOVES = 1
"""How often a request is given to another replica when its own died. One that was there at two
deaths may be what engines die of."""


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A caller's request, made ready for whichever replica gets it."""

    processed: ProcessedRequest
    packed: bytes
    """Its ``Add``."""
    block_hashes: Sequence[bytes]
    """For the router; empty where that does not ask."""


@dataclass(slots=True)
class _InFlight:
    """A caller's request that has not ended."""

    consumer: Consumer
    replica: Replica
    has_begun: bool = False
    """Somebody was told a part of its answer."""
    num_moves: int = 0


class ReplicaSet:
    """Gives each request to a replica, hands out what comes of it, and outlives replicas' deaths.

    A replica that dies ends those of its requests that had begun, with an error. Others are given
    to another one that runs, if there is one; nobody notices, as seeds are the server's.
    """

    def __init__(
        self,
        hosts: Sequence[EngineHost],
        starters: Sequence[Starter],
        router: Router | None,
        events: ServerEvents,
        room: WaitingRoom,
        outputs: OutputProcessor,
    ) -> None:
        """Without ``starters`` a replica that dies stays dead; without a ``router`` it is each
        one's turn."""
        self.config = common_config([host.config for host in hosts])
        alone = len(hosts) == 1
        self.replicas = [
            Replica(
                index,
                host,
                events.engines[index],
                room,
                starters[index] if starters else None,
                self,
                alone=alone,
            )
            for index, host in enumerate(hosts)
        ]
        if alone or router is None:  # one engine need not tell what it has cached
            router = RoundRobin()
        self._dispatcher = Dispatcher(router, len(hosts), self.config.block_size)
        if not alone:
            for index, of_engine in enumerate(events.engines):
                observe = partial(self._dispatcher.observe, index)
                of_engine.subscribe(observe, *self._dispatcher.kinds)
        self._room = room
        self._outputs = outputs
        self._in_flight: dict[str, _InFlight] = {}
        self.given_up = asyncio.Event()
        self.why_given_up: str | None = None
        """Set when no replica could be started again, and why."""

    # --- requests

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._in_flight

    def ready(self, request: ProcessedRequest) -> ReadyRequest:
        """On whatever thread.

        Raises:
            InvalidRequestError: it can't be sent.
        """
        try:
            packed = self.replicas[0].pack(Add.of(request.request_id, request.requests))
        except (OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                f"a parameter can't be passed on to the engine ({error}): integers have 64 bits "
                f"at most, and texts are valid Unicode"
            ) from None
        return ReadyRequest(request, packed, self._dispatcher.block_hashes(request.requests[0]))

    async def until_free(self, choice_ids: Iterable[str]) -> None:
        """Waits until the engines have told of the ends of all older choices with these ids."""
        ids = list(choice_ids)
        while busy := [one for one in self.replicas if any(i in one.choices for i in ids)]:
            await busy[0].choices.until_free(ids)

    def open(self, requests: Sequence[ReadyRequest]) -> Consumer:
        """Gives each request to a replica, while one runs. Returns who gets all their deltas.

        Raises:
            RouterError: a user's router is at fault; none of them was given away.
        """
        chosen: list[Replica] = []
        try:
            chosen.extend(self._choose(one.processed, one.block_hashes) for one in requests)
        except MiniInferError:
            for request, replica in zip(requests, chosen, strict=False):
                self._dispatcher.take_back(replica.index, _choice_ids(request.processed))
            raise
        consumer = Consumer([request.processed.request_id for request in requests])
        for request, replica in zip(requests, chosen, strict=True):
            self._in_flight[request.processed.request_id] = _InFlight(consumer, replica)
            self._outputs.add(request.processed)
            _give(request, replica)
        return consumer

    def abandon(self, consumer: Consumer) -> None:
        """Aborts what the consumer still waits for."""
        for request_id in list(consumer.unfinished):
            replica = self._forget(request_id).replica
            children = self._outputs.unfinished_choices(request_id)
            replica.send(Finish(children, "abort"))
            self._outputs.abort(request_id)

    def _choose(self, request: ProcessedRequest, block_hashes: Sequence[bytes]) -> Replica:
        if len(self.replicas) == 1:
            return self.replicas[0]
        running = [replica.index for replica in self.replicas if replica.running]
        return self.replicas[self._dispatcher.send(request.requests, block_hashes, running)]

    def _forget(self, request_id: str) -> _InFlight:
        flight = self._in_flight.pop(request_id)
        del flight.consumer.unfinished[request_id]
        return flight

    # --- what a replica tells

    def on_news(self, replica: Replica, news: News) -> None:
        for event in news.happened():
            replica.events.emit(event)
        self._end_choices(replica, news.unqueued)
        for request_id, failure in news.refusals:
            self._refuse(request_id, replica, failure.to_exception())
        if not news.updates:
            return
        for update in news.updates:
            if update.finish_reason == "error":  # perhaps before it was queued
                self._end_choices(replica, (update.request_id,))
        processed = self._outputs.process(news.updates)
        for child_id, stop_string in processed.stopped:
            replica.send(Finish([child_id], "stop", stop_string))
        for delta in processed.deltas:
            flight = self._in_flight.get(delta.request_id)
            if flight:
                flight.has_begun = True
                if delta.output:
                    self._forget(delta.request_id)
                consumer = flight.consumer
                consumer.push(delta)
                if consumer.backlog > MAX_BACKLOG:
                    self.abandon(consumer)
                    consumer.fail(
                        SlowReaderError("the stream was read too slowly: read as it comes")
                    )

    def _end_choices(self, replica: Replica, choice_ids: Sequence[str]) -> None:
        """Of their ends no event tells, or has told already."""
        replica.choices.refuse(choice_ids)
        self._dispatcher.take_back(replica.index, choice_ids)

    def _refuse(self, request_id: str, replica: Replica, error: Exception) -> None:
        self._end_choices(replica, self._outputs.unfinished_choices(request_id))
        self._outputs.abort(request_id)
        if request_id in self._in_flight:
            self._forget(request_id).consumer.fail(error)

    # --- replicas' lives

    @property
    def running(self) -> bool:
        """Does any replica?"""
        return any(replica.running for replica in self.replicas)

    def check_running(self) -> None:
        """Raises EngineDeadError, which says why, where no replica runs."""
        if not self.running:
            raise EngineDeadError(self.replicas[0].death)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listens to the engines."""
        for replica in self.replicas:
            replica.start(loop)

    def listen(self) -> None:
        """Tells the engines which events anybody wants."""
        for replica in self.replicas:
            replica.listen()

    async def call(self, function: str, *arguments: str) -> list[str | None]:
        """Calls a function of every engine that runs. That one dies meanwhile matters only where
        it is the last.

        Raises:
            EngineDeadError: all of them did.
            MiniInferError: what an engine raised.
        """
        calls = [one.call(function, *arguments) for one in self.replicas if one.running]
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = [result for result in results if not isinstance(result, BaseException)]
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not answers or not isinstance(error, EngineDeadError):
                raise error
        return answers

    def end_requests(self, death: str) -> None:
        """Ends every request, and hears no more of any engine."""
        for replica in self.replicas:
            replica.detach(death)
        for replica in self.replicas:
            self.on_death(replica)

    def close(self) -> None:
        """Ends the engines, and waits for their ends. Idempotent."""
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            list(pool.map(Replica.close, self.replicas))

    def on_death(self, replica: Replica) -> None:
        assert replica.death is not None
        self._dispatcher.forget(replica.index)
        num_output_tokens: Mapping[str, int] = self._outputs.num_output_tokens()
        moving: list[ProcessedRequest] = []
        for request_id, flight in list(self._in_flight.items()):
            if flight.replica is not replica:
                continue
            if self.running and not flight.has_begun and flight.num_moves < MAX_MOVES:
                moving.append(self._outputs.restart(request_id))
            else:
                self._fail(request_id, EngineDeadError(replica.death))
        rerouted = {choice_id for request in moving for choice_id in _choice_ids(request)}
        replica.choices.lose_all(num_output_tokens, rerouted)
        for request in moving:
            self._move(request)

    def on_given_up(self, replica: Replica) -> None:
        if all(one.given_up for one in self.replicas):
            self.why_given_up = replica.death
            self.given_up.set()

    def _fail(self, request_id: str, error: MiniInferError) -> None:
        flight = self._forget(request_id)
        self._outputs.abort(request_id, "error")
        flight.consumer.fail(error)

    def _move(self, request: ProcessedRequest) -> None:
        """Gives a request whose replica died to another one."""
        ready, flight = self.ready(request), self._in_flight[request.request_id]
        try:
            flight.replica = self._choose(request, ready.block_hashes)
        except MiniInferError as error:  # a user's router
            self._room.leave(len(request.requests))
            self._fail(request.request_id, error)
            return
        flight.num_moves += 1
        _give(ready, flight.replica)


def _choice_ids(request: ProcessedRequest) -> list[str]:
    return [choice.request_id for choice in request.requests]


def _give(request: ReadyRequest, replica: Replica) -> None:
    replica.choices.add(_choice_ids(request.processed))
    replica.send(request.packed)
