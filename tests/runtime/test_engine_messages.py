"""What is sent is what arrives: requests, updates, every kind of event, and errors."""

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.core import errors
from mini_infer.core.events import Event
from mini_infer.core.outputs import RequestUpdate, TokenLogprobs
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.runtime.engine_messages import (
    EVENT_KINDS,
    Add,
    Failure,
    Loaded,
    News,
    ToEngine,
    ToServer,
    pack_event,
    unpack_event,
)
from mini_infer.runtime.resolve import resolve_core

IDS = st.lists(st.integers(0, 2**31), max_size=5)
FORMS = st.sampled_from(
    [
        None,
        StructuredOutputsParams(regex="a+"),
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(json={"type": "object"}),
        StructuredOutputsParams(json_object=True),
    ]
)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 5),
    top_k=st.integers(-1, 2**40),
    top_p=st.floats(0.01, 1),
    presence_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(5, 2**40),
    stop=st.lists(st.text(min_size=1, max_size=4).filter(str.isprintable), max_size=3),
    stop_token_ids=IDS,
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.just("word"), max_size=2),
    structured_outputs=FORMS,
)
LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=st.integers(0, 9),
    logprob=st.floats(-9, 0),
    rank=st.integers(1, 9),
    top=st.just(((1, -0.5), (2, -1.0))),
)
UPDATES = st.builds(
    RequestUpdate,
    request_id=st.text(max_size=9),
    new_token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    new_logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | st.integers(0, 99) | st.text(max_size=4),
    num_cached_tokens=st.integers(0, 2**31),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=2).map(tuple),
    time=st.none() | st.floats(0, 1e6),
)


def sent(message: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


@given(PARAMS, st.lists(st.integers(0, 2**20), min_size=1, max_size=9), st.booleans())
def test_requests(params: SamplingParams, prompt: list[int], told_at_end: bool) -> None:
    requests = [
        Request(
            request_id=f"a#{index}",
            prompt_token_ids=prompt,
            params=params,
            seed=2**63 - 1 - index,
            max_tokens=7,
            eos_token_ids=frozenset({2, 5}),
            bad_words_token_ids=((1, 2), (3,)),
            priority=-3,
            cache_salt="salt",
            told_at_end=told_at_end,
        )
        for index in range(params.n)
    ]
    arrived = sent(Add.of("a", requests), ToEngine).requests()
    assert len(arrived) == len(requests)
    for one, other in zip(requests, arrived, strict=True):
        for field in dataclasses.fields(Request):
            assert getattr(one, field.name) == getattr(other, field.name), field.name
        assert isinstance(other.params.stop, tuple)


@given(st.lists(UPDATES, max_size=3))
def test_updates(updates: list[RequestUpdate]) -> None:
    news = sent(News(updates, [], [], ["b"]), ToServer)
    assert news.updates == updates
    assert all(isinstance(update, RequestUpdate) for update in news.updates)


VALUES: dict[str, Any] = {
    "time": 1.5,
    "request_id": "a",
    "reason": "stop",
    "token_ids": (3, 4),
    "block_ids": (7,),
    "block_hashes": (b"one", b"other"),
    "block_hash": b"one",
    "first_token_time": None,
    "last_token_time": 2.5,
}


@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_events(kind: type[Event]) -> None:
    values = {
        field.name: VALUES.get(field.name, place)
        for place, field in enumerate(dataclasses.fields(kind))
    }
    event = kind(**values)
    [arrived] = sent(News([], [pack_event(event)], [], []), ToServer).happened()
    assert arrived == event
    assert type(arrived) is kind
    assert unpack_event(pack_event(event)) == event


def test_every_event_that_an_engine_emits_can_cross() -> None:
    def kinds_of(kind: type[Event]) -> set[type[Event]]:
        return {kind}.union(*map(kinds_of, kind.__subclasses__()))

    names = {kind.__name__ for kind in kinds_of(Event)} - {"Event", "RequestEvent"}
    assert names - {kind.__name__ for kind in EVENT_KINDS} == {"Answered", "Rerouted"}, (
        "the server's own"
    )


def test_a_configuration() -> None:
    config, _ = resolve_core({"dry_run": True, "num_kv_blocks": 64})
    assert sent(Loaded(config), ToServer) == Loaded(config)


@pytest.mark.parametrize(
    "error",
    [
        errors.PromptTooLongError("too long", "prompt"),
        errors.OutOfMemoryError("no room"),
        errors.PolicyError("no key"),
        ModuleNotFoundError("no torch", name="torch"),
        PermissionError("not allowed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_a_user_is_told(error: Exception) -> None:
    arrived = sent(Failure.of(error), Failure).to_exception()
    assert isinstance(arrived, OSError if isinstance(error, OSError) else type(error))
    assert str(arrived) == str(error)
    for name in ("param", "name", "status", "exit_code"):
        assert getattr(arrived, name, None) == getattr(error, name, None)


def test_other_errors_keep_their_name() -> None:
    arrived = Failure.of(ZeroDivisionError("by zero")).to_exception()
    assert str(arrived) == "ZeroDivisionError: by zero"
    assert isinstance(Failure.of(MemoryError()).to_exception(), MemoryError)
