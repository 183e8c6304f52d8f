"""Faults that are not the client's: a typed error each, and no detail of what went wrong inside."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from mini_infer.core.errors import EngineDeadError, MiniInferError, StepError
from mini_infer.core.outputs import RequestDelta
from mini_infer.runtime.engine import LLMEngine
from mini_infer.serving.app import create_app
from mini_infer.serving.errors import error_object, raise_for_failure
from tests.runtime.engine_host import threaded
from tests.serving.live import CHAT, COMPLETIONS, LiveServer

HELLO = [{"role": "user", "content": "Hello"}]


def test_an_error_object_is_always_text() -> None:
    assert error_object("half a pair: \ud800", 400)["error"]["message"] == "half a pair: ?"


def test_an_unexpected_fault_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine.from_options(dry_run=True)
    app = create_app(threaded(engine))

    def fail(*args: object, **kwargs: object) -> str:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", fail)
    with TestClient(app, raise_server_exceptions=False) as client:
        response = client.post(CHAT, json={"messages": HELLO})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_answers_503(stream: bool) -> None:
    async_engine = threaded(LLMEngine.from_options(dry_run=True))
    with TestClient(create_app(async_engine)) as client:
        assert client.get("/health").json() == {"status": "ok"}
        async_engine.shutdown()
        assert client.get("/health").status_code == 503
        response = client.post(CHAT, json={"messages": HELLO, "stream": stream})
        assert response.status_code == EngineDeadError.status
        assert response.json()["error"]["type"] == "service_unavailable_error"


def test_a_request_that_was_aborted_is_an_error() -> None:
    with pytest.raises(MiniInferError, match="aborted by the server"):
        raise_for_failure(RequestDelta("a", 0, "", (), finish_reason="abort"))


def test_a_failed_step_is_a_typed_error() -> None:
    with pytest.raises(StepError):
        raise_for_failure(RequestDelta("a", 0, "", (), finish_reason="error"))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
def test_what_came_with_a_failure_is_told_before_it(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def failing(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        [request_id] = prompts
        deltas = [RequestDelta(request_id, 0, text, (1,)) for text in ("Well ", "then")]
        yield [*deltas, RequestDelta(request_id, 0, "", (), finish_reason="error")]

    monkeypatch.setattr(server.async_engine, "stream", failing)
    prompt = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "Hello"}}
    body = {**prompt.get(path, {"input": "Hello"}), "stream": True}
    text = server.client.post(path, json=body).text
    assert 0 < text.index('"Well "') < text.index('"then"') < text.index("the model failed on")


@pytest.mark.parametrize("num_good_steps", [0, 2], ids=["at once", "in the middle"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_step_raised_is_told_to_the_log_only(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    num_good_steps: int,
) -> None:
    engine = LLMEngine.from_options(dry_run=True)
    submit = engine.core.executor.submit
    steps = iter(range(100))

    def fail_later(batch: Any) -> Any:
        if next(steps) >= num_good_steps:
            raise RuntimeError("a secret detail")
        return submit(batch)

    monkeypatch.setattr(engine.core.executor, "submit", fail_later)
    with TestClient(create_app(threaded(engine))) as client:
        response = client.post(
            CHAT, json={"messages": HELLO, "stream": stream, "ignore_eos": True, "max_tokens": 9}
        )
    if not (stream and num_good_steps):  # else it depends on who is faster
        assert response.status_code == 500
    assert '"type":"server_error"' in response.text
    assert "the model failed on this request" in response.text
    assert "secret" not in response.text
    assert "a secret detail" in caplog.text
