"""``RequestOutput.metrics``: the milestones of one request, read from the event stream."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer.core.events import (
    ChunkScheduled,
    Event,
    EventStream,
    Finished,
    Preempted,
    Queued,
    RequestEvent,
    TokensEmitted,
)
from mini_infer.core.outputs import RequestMetrics


@dataclass(slots=True)
class _Choice:
    metrics: RequestMetrics
    """Shared by all choices of a caller's request."""
    is_first: bool
    finished_time: float | None = None
    """When the scheduler ended it; None while a stop string or an abort is ahead of that."""


class RequestMetricsObserver:
    """Fills metrics while requests run: a request's are its choices' first and last milestones."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._choices: dict[str, _Choice] = {}
        events.subscribe(self._observe)

    def add(self, choice_ids: Sequence[str]) -> RequestMetrics:
        """Starts to follow a caller's request, whose choices have these ids in the scheduler."""
        metrics = RequestMetrics(queued_time=self._events.now())
        for index, choice_id in enumerate(choice_ids):
            self._choices[choice_id] = _Choice(metrics, is_first=index == 0)
        return metrics

    def end(self, choice_id: str) -> None:
        """Stops following a choice, which ends now unless the scheduler ended it before."""
        choice = self._choices.pop(choice_id)
        finished_time = choice.finished_time
        choice.metrics.finished_time = (
            self._events.now() if finished_time is None else finished_time
        )

    def _observe(self, event: Event) -> None:
        if not isinstance(event, RequestEvent):
            return
        choice = self._choices.get(event.request_id)
        if choice is None:
            return
        metrics = choice.metrics
        if isinstance(event, TokensEmitted):
            if metrics.first_token_time is None:
                metrics.first_token_time = event.time
            metrics.last_token_time = event.time
        elif isinstance(event, ChunkScheduled):
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = event.time
        elif isinstance(event, Queued):
            if choice.is_first:
                metrics.queued_time = event.time
        elif isinstance(event, Preempted):
            metrics.num_preemptions += 1
        elif isinstance(event, Finished):
            choice.finished_time = event.time
