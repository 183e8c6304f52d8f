"""The event stream."""

from mini_infer.core.events import Event, EventStream


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
