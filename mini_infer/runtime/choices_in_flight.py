"""The choices that an engine in another process was given, until it tells of their ends."""

import asyncio
from collections.abc import Collection, Iterable, Mapping

from mini_infer.core.events import Event, EventStream, Finished, Queued, Rerouted
from mini_infer.runtime.waiting_room import WaitingRoom


class ChoicesInFlight:
    """Knows what the engine may still talk about, and has the last word where it can't any more.

    A choice leaves with its ``Finished``, which may come after its caller was answered: a stop
    string and an abort are the server's own decisions. Until then its id is not free, or news of
    the old choice would be taken for the new one's.
    """

    def __init__(self, events: EventStream, room: WaitingRoom) -> None:
        self._events = events
        self._room = room
        self._choices: dict[str, Queued | None] = {}
        """None: on its way, not yet queued."""
        self._left = asyncio.Event()
        events.subscribe(self._observe, Queued, Finished)

    def add(self, choice_ids: Iterable[str]) -> None:
        """They are sent to the engine now."""
        self._choices |= dict.fromkeys(choice_ids)

    def __contains__(self, choice_id: str) -> bool:
        return choice_id in self._choices

    async def until_free(self, choice_ids: Iterable[str]) -> None:
        """Waits until the engine has told of the ends of all older choices with these ids."""
        choice_ids = list(choice_ids)
        while any(choice_id in self._choices for choice_id in choice_ids):
            self._left.clear()
            await self._left.wait()

    def refuse(self, choice_ids: Iterable[str]) -> None:
        """The engine refused a request: those of its choices that it did queue have ended."""
        for choice_id in choice_ids:
            if self._choices.pop(choice_id, self) is None:
                self._room.leave(1)
        self._left.set()

    def lose_all(
        self, num_output_tokens: Mapping[str, int], rerouted: Collection[str] = ()
    ) -> None:
        """The engine is gone. What it had queued ends with an error, with as many tokens as came;
        what was on its way was never queued, and waits no longer. What is ``rerouted`` waits on."""
        lost, self._choices = self._choices, {}
        for choice_id, queued in lost.items():
            if choice_id in rerouted:
                if queued is not None:
                    self._events.emit(Rerouted(self._events.now(), choice_id))
                continue
            if queued is None:
                self._room.leave(1)
                continue
            self._events.emit(
                Finished(
                    self._events.now(),
                    choice_id,
                    "error",
                    queued.num_prompt_tokens,
                    num_output_tokens.get(choice_id, 0),
                )
            )
        self._left.set()

    def _observe(self, event: Event) -> None:
        if isinstance(event, Queued):
            self._choices[event.request_id] = event
        elif isinstance(event, Finished) and self._choices.pop(event.request_id, None):
            self._left.set()
