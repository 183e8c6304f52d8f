"""``mini-infer chat``: the conversation, Ctrl-C, pipes, and a real terminal once."""

import io
import itertools
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mini_infer.cli.chat import ChatSession, Interrupt, rate
from mini_infer.cli.main import main
from mini_infer.core.errors import PromptTooLongError
from mini_infer.core.outputs import RequestDelta
from mini_infer.core.sampling_params import SamplingParams

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_tokens=None)


class FakeModel:
    """Answers ``one two three``; presses Ctrl-C before the pieces numbered in ``interrupt_at``."""

    def __init__(self, interrupt_at: Sequence[int] = ()) -> None:
        self.interrupt_at = interrupt_at
        self.conversations: list[list[Mapping[str, Any]]] = []
        self.closed = 0

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Generator[RequestDelta, None, None]:
        self.conversations.append(list(messages))
        if messages[-1]["content"] == "too long":
            raise PromptTooLongError("the prompt has 9 tokens, max_model_len is 8")
        try:
            for index, text in enumerate(("one", " two", " three")):
                if index in self.interrupt_at:
                    signal.raise_signal(signal.SIGINT)
                yield RequestDelta("r", 0, text, (index,))
        finally:
            self.closed += 1


def reader(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Returns the lines, raising those that are exceptions; then the input ends."""
    remaining = iter((*lines, EOFError))

    def read(prompt: str) -> str:
        line = next(remaining)
        if isinstance(line, str):
            return line
        raise line

    return read


def chat(model: FakeModel, *lines: str | type[BaseException], system: str | None = None) -> int:
    ticks = itertools.count()
    return ChatSession(model, PARAMS, reader(*lines), system, lambda: float(next(ticks))).loop()


def test_history_grows(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    assert chat(model, "hi", "and?", system="Be brief.") == 0
    assert model.conversations[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "and?"},
    ]
    captured = capsys.readouterr()
    assert captured.out == "one two three\n" * 2
    assert captured.err.count("(3 tokens, first after 1.00 s, then 2.0 tokens/s)") == 2


def test_reset_forgets_all_but_the_system_message() -> None:
    model = FakeModel()
    chat(model, "hi", "/reset", "again", system="Be brief.")
    assert [message["role"] for message in model.conversations[1]] == ["system", "user"]


@pytest.mark.parametrize("leave", ["/exit", "/quit", EOFError])
def test_leaving(leave: str | type[BaseException]) -> None:
    model = FakeModel()
    assert chat(model, "hi", leave, "never asked") == 0
    assert len(model.conversations) == 1


@pytest.mark.parametrize("line", ["/help", "/what now"])
def test_help_and_unknown_commands_ask_the_model_nothing(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel()
    chat(model, line, "", "   ")
    assert model.conversations == []
    assert "/reset" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel(interrupt_at=[1])
    assert chat(model, "hi", "go on") == 0
    assert model.closed == 2
    assert model.conversations[1][1] == {"role": "assistant", "content": "one two"}
    assert " three" not in capsys.readouterr().out


def test_ctrl_c_before_the_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel(interrupt_at=[0])
    chat(model, "hi", "go on")
    assert model.conversations[1][1] == {"role": "assistant", "content": "one"}


def test_ctrl_c_at_the_prompt_after_a_stopped_answer_leaves() -> None:
    model = FakeModel(interrupt_at=[1])
    assert chat(model, "hi", KeyboardInterrupt, "never asked") == 0
    assert len(model.conversations) == 1


def test_ctrl_c_twice_at_the_prompt_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    assert chat(model, KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, "no") == 0
    assert len(model.conversations) == 1
    assert capsys.readouterr().err.count("Ctrl-C again") == 2


def test_second_ctrl_c_within_an_answer_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt.caught() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refused_message_does_not_stay_in_the_conversation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = FakeModel()
    assert chat(model, "too long", "short") == 2
    assert [message["content"] for message in model.conversations[1]] == ["short"]
    captured = capsys.readouterr()
    assert "error: the prompt has 9 tokens, max_model_len is 8" in captured.err
    assert captured.out == "one two three\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 0.5, 0.0), "(1 token, first after 0.50 s)"),
        ((11, 0.25, 2.0), "(11 tokens, first after 0.25 s, then 5.0 tokens/s)"),
        ((0, 0.1, 1.0), "(0 tokens, first after 0.10 s)"),
    ],
)
def test_rate(arguments: tuple[int, float, float], expected: str) -> None:
    assert rate(*arguments) == expected


def test_piped_lines_are_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/reset\nhi"))
    assert main(["chat", "--dry-run", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()
    assert first == second
    assert ">>>" not in captured.out
    assert captured.err.count("tokens/s") == 2


def test_in_a_terminal() -> None:
    program = "import sys; from mini_infer.cli.main import main; sys.exit(main())"
    arguments = ["chat", "--dry-run", "--ignore-eos"]
    terminal, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=child,
        stdout=child,
        stderr=child,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    ) as process:
        os.close(child)
        try:
            wait_for(terminal, b">>> ")
            os.write(terminal, b"tell me\n")
            wait_for(terminal, b". ")
            process.send_signal(signal.SIGINT)
            wait_for(terminal, b">>> ")
            os.write(terminal, b"/exit\n")
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(terminal)


def wait_for(terminal: int, text: bytes, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    seen = b""
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], deadline - time.monotonic())
        assert ready, f"no {text!r} in {seen!r}"
        seen += os.read(terminal, 4096)
