"""``mini-infer chat``: a conversation in the terminal."""

import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

import click

from mini_infer.cli.options import given, with_engine_options
from mini_infer.cli.sampling import sampling_params, with_sampling_options
from mini_infer.core.errors import InvalidRequestError, MiniInferError
from mini_infer.core.outputs import RequestDelta
from mini_infer.core.sampling_params import SamplingParams

HELP = """\
/reset  forget the conversation
/help   show this list
/exit   leave (so does Ctrl-D)
Ctrl-C  stop the answer; at the prompt, twice, leave"""


class ChatModel(Protocol):
    """The part of ``LLM`` that a chat needs."""

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Generator[RequestDelta, None, None]: ...


class Interrupt:
    """Remembers Ctrl-C instead of raising, so that it never lands in the middle of a step."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @classmethod
    @contextmanager
    def caught(cls) -> Iterator["Interrupt"]:
        """A first Ctrl-C inside the block is a request; a second one raises as usual."""
        interrupt = cls()
        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield interrupt
        finally:
            signal.signal(signal.SIGINT, previous)


class ChatSession:
    """The conversation so far and the loop around it.

    ``read(prompt)`` returns the user's next line; it raises EOFError at the end of the input and
    KeyboardInterrupt at Ctrl-C. Answers go to standard output, everything else to standard error.
    """

    def __init__(
        self,
        model: ChatModel,
        params: SamplingParams,
        read: Callable[[str], str],
        system: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.params = params
        self.read = read
        self.clock = clock
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.system)
        self.exit_code = 0

    def loop(self) -> int:
        """Chats until the user leaves; returns the exit code of the last error, else 0."""
        interrupted = False
        while True:
            try:
                line = self.read(">>> ").strip()
            except EOFError:
                return self.exit_code
            except UnicodeDecodeError as error:
                message = f"the input is no {error.encoding} text"
                raise InvalidRequestError(message) from None
            except KeyboardInterrupt:
                if interrupted:
                    say("")
                    return self.exit_code
                interrupted = True
                say("\n(Ctrl-C again, Ctrl-D or /exit to leave)")
                continue
            interrupted = False
            if line in ("/exit", "/quit"):
                return self.exit_code
            if line.startswith("/"):
                self.command(line)
            elif line:
                interrupted = self.answer(line)

    def command(self, line: str) -> None:
        if line == "/reset":
            self.messages = list(self.system)
            say("(forgotten)")
        elif line == "/help":
            say(HELP)
        else:
            say(f"unknown command {line.split()[0]}\n{HELP}")

    def answer(self, question: str) -> bool:
        """Streams one answer. Returns whether Ctrl-C cut it short.

        What was said of a stopped answer stays in the conversation; a question that got no answer
        at all does not.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        text = ""
        num_tokens = 0
        started = self.clock()
        first = None
        with Interrupt.caught() as interrupt:
            try:
                with closing(self.model.stream_chat(messages, self.params)) as deltas:
                    for delta in deltas:
                        first = self.clock() if first is None else first
                        num_tokens += len(delta.token_ids)
                        text += delta.text
                        click.echo(delta.text, nl=False)
                        sys.stdout.flush()
                        if interrupt.requested:
                            break
            except MiniInferError as error:
                self.exit_code = error.exit_code
                click.echo(f"error: {error} (/reset starts a new conversation)", err=True)
        if text:
            click.echo()
            self.messages = [*messages, {"role": "assistant", "content": text}]
        if first is not None:
            say(rate(num_tokens, first - started, self.clock() - first))
        return interrupt.requested


def rate(num_tokens: int, to_first: float, decoding: float) -> str:
    """The line under an answer: the rate is that of decoding, without the first token's wait."""
    words = f"{num_tokens} token{'' if num_tokens == 1 else 's'}, first after {to_first:.2f} s"
    if num_tokens > 1 and decoding > 0:
        words += f", then {(num_tokens - 1) / decoding:.1f} tokens/s"
    return f"({words})"


def say(text: str) -> None:
    """Writes what is not part of an answer."""
    click.secho(text, err=True, dim=True)


def terminal_reader() -> Callable[[str], str]:
    """``input`` with line editing and history, or silent reading where stdin is no terminal."""
    if not sys.stdin.isatty():
        return lambda prompt: input()
    with suppress(ImportError):
        import readline  # noqa: F401  (importing it is what turns history on)
    return input


@click.command()
@click.option("--system", default=None, help="System message of the conversation.")
@with_sampling_options(max_tokens=None, temperature=0.3)
@with_engine_options
def chat(system: str | None, **options: Any) -> int:
    """Chat with a model in the terminal. Each line of piped input is a message."""
    params = sampling_params(options)
    from mini_infer.runtime.llm import LLM

    with LLM(**given(options)) as llm:
        if sys.stdin.isatty():
            say("/help shows the commands.")
        return ChatSession(llm, params, terminal_reader(), system).loop()
