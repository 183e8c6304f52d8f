"""The event stream."""

from mini_infer.core.events import (
    BlockEvicted,
    Event,
    EventStream,
    Preempted,
    Queued,
    RequestEvent,
)


def test_every_subscriber_sees_every_event_in_order() -> None:
    stream = EventStream(clock=iter([1.0, 2.0]).__next__)
    one: list[Event] = []
    other: list[Event] = []
    stream.subscribe(one.append)
    stream.subscribe(other.append)
    stream.emit(Event(stream.now()))
    stream.emit(Event(stream.now()))
    assert [event.time for event in one] == [1.0, 2.0]
    assert one == other


def test_an_unsubscribed_one_hears_no_more() -> None:
    stream = EventStream()
    heard: list[Event] = []
    subscriber = heard.append
    stream.subscribe(subscriber)
    stream.emit(Event(0.0))
    stream.unsubscribe(subscriber)
    stream.emit(Event(1.0))
    assert len(heard) == 1


def test_a_subscriber_to_some_types_hears_those_and_derived_ones_only() -> None:
    stream = EventStream()
    queued: list[Event] = []
    of_requests: list[Event] = []
    everything: list[Event] = []
    stream.subscribe(queued.append, Queued)
    stream.subscribe(of_requests.append, RequestEvent)
    stream.subscribe(everything.append)
    events = [Queued(0.0, "a", 3), BlockEvicted(1.0, 7, b"7"), Preempted(2.0, "a", 3)]
    for event in events:
        stream.emit(event)
    assert queued == events[:1]
    assert of_requests == [events[0], events[2]]
    assert everything == events


def test_what_nobody_listens_to_need_not_be_built() -> None:
    stream = EventStream()
    assert not stream.wants(Queued)
    heard: list[Event] = []
    subscriber = heard.append
    stream.subscribe(subscriber, Queued)
    assert stream.wants(Queued)
    assert not stream.wants(Preempted)
    stream.subscribe(print)
    assert stream.wants(Preempted)
    stream.unsubscribe(print)
    stream.unsubscribe(subscriber)
    assert not stream.wants(Queued)


def test_one_that_subscribes_while_an_event_is_handed_out_hears_the_next() -> None:
    stream = EventStream()
    late: list[Event] = []
    stream.subscribe(lambda event: stream.subscribe(late.append) if event.time == 0 else None)
    stream.emit(Event(0.0))
    stream.emit(Event(1.0))
    assert [event.time for event in late] == [1.0]
