"""``RequestOutput.metrics``: the milestones of one request, read from the event stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mini_infer.core.draft_counts import DraftCounts
from mini_infer.core.events import (
    Admitted,
    DraftsVerified,
    Event,
    EventStream,
    Finished,
    Preempted,
    Queued,
)
from mini_infer.core.outputs import RequestMetrics
from mini_infer.core.request import Request


@dataclass(slots=True)
class _Choice:
    metrics: RequestMetrics
    """Shared by all choices of a caller's request."""
    is_first: bool
    finished: Finished | None = None
    """The scheduler's word on its end; None while a stop string is ahead of that."""


class RequestMetricsObserver:
    """Fills metrics while requests run: a request's are its choices' first and last milestones.

    It listens to what comes a few times in a request's life. The times of its tokens come with its
    updates and its end, so that no event per token need be built for them. Its drafts, which only
    speculation has, are told of as they are verified: a stop string ends a choice before the
    scheduler does.
    """

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._choices: dict[str, _Choice] = {}
        events.subscribe(self._observe, Queued, Admitted, Preempted, DraftsVerified, Finished)

    def add(self, choices: Sequence[Request]) -> RequestMetrics:
        """Starts to follow a caller's request, whose choices these are."""
        metrics = RequestMetrics(queued_time=self._events.now())
        for index, request in enumerate(choices):
            self._choices[request.request_id] = _Choice(metrics, is_first=index == 0)
        return metrics

    def end(
        self, choice_id: str, first_token_time: float | None, last_token_time: float | None
    ) -> None:
        """Stops following a choice, which ends now unless the scheduler ended it before. The times
        are those of the tokens that its updates told of."""
        choice = self._choices.pop(choice_id)
        metrics, finished = choice.metrics, choice.finished
        if finished is not None and first_token_time is None:
            first_token_time, last_token_time = finished.first_token_time, finished.last_token_time
        metrics.first_token_time = _among_known(min, metrics.first_token_time, first_token_time)
        metrics.last_token_time = _among_known(max, metrics.last_token_time, last_token_time)
        metrics.finished_time = self._events.now() if finished is None else finished.time

    def _observe(self, event: Event) -> None:
        assert isinstance(event, Queued | Admitted | Preempted | DraftsVerified | Finished)
        choice = self._choices.get(event.request_id)
        if choice is None:
            return
        metrics = choice.metrics
        if isinstance(event, Queued):
            if choice.is_first:
                metrics.queued_time = event.time
        elif isinstance(event, Admitted):  # with its first chunk
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = event.time
        elif isinstance(event, Preempted):
            metrics.num_preemptions += 1
        elif isinstance(event, DraftsVerified):
            if metrics.drafts is None:
                metrics.drafts = DraftCounts()
            metrics.drafts.add(
                event.num_drafts, event.num_accepted, event.seconds, event.plain_seconds
            )
        else:
            choice.finished = event


def _among_known(
    choose: Callable[[Sequence[float]], float], one: float | None, other: float | None
) -> float | None:
    """The first or last of the times that are known."""
    known = [time for time in (one, other) if time is not None]
    return choose(known) if known else None
