"""``mini-infer generate``: complete prompts from the command line."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mini_infer.cli.options import given, with_engine_options
from mini_infer.cli.sampling import sampling_params, with_sampling_options
from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.outputs import RequestOutput

if TYPE_CHECKING:
    from mini_infer.core.sampling_params import SamplingParams
    from mini_infer.runtime.llm import LLM


def read_prompts(prompts: tuple[str, ...]) -> list[str]:
    """The prompts as given; ``-``, or none at all beside a pipe, stands for standard input.

    Raises:
        InvalidRequestError: standard input is no text.
    """
    if not prompts and sys.stdin.isatty():
        raise click.UsageError("give a --prompt, or pipe one into standard input")
    try:
        texts = [sys.stdin.read() if item == "-" else item for item in prompts or ("-",)]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is no {error.encoding} text", "prompt") from None
    if texts == [""] and prompts in ((), ("-",)):
        raise click.UsageError("standard input is empty: give a --prompt, or pipe one into it")
    return texts


def as_json(output: RequestOutput) -> str:
    """A finished request as one line of JSON."""
    return json.dumps(asdict(output), ensure_ascii=False)


def stream(llm: "LLM", prompt: str, params: "SamplingParams") -> None:
    """Prints the text as it comes."""
    for delta in llm.stream(prompt, params):
        click.echo(delta.text, nl=False)
        sys.stdout.flush()
    click.echo()


def show(output: RequestOutput, json_lines: bool) -> None:
    """Prints a finished request, each choice under a line that says which it is."""
    if json_lines:
        click.echo(as_json(output))
        return
    for choice in output.outputs:
        click.echo(f"--- {output.prompt!r} [{choice.index}] ({choice.finish_reason})")
        click.echo(choice.text)


@click.command()
@click.option("--prompt", "prompts", multiple=True, help="Text to complete; - reads stdin. Repeat.")
@click.option("--json", "json_lines", is_flag=True, help="Print one JSON object per prompt.")
@with_sampling_options(max_tokens=128, temperature=1.0)
@click.option("--n", default=1, show_default=True, help="Choices per prompt.")
@click.option("--logprobs", type=int, default=None, help="Log-probabilities of this many tokens.")
@with_engine_options
def generate(
    prompts: tuple[str, ...], json_lines: bool, n: int, logprobs: int | None, **options: Any
) -> None:
    """Complete one or more prompts and print the text (streamed, when it is a single one)."""
    params = sampling_params(options, n=n, logprobs=logprobs)
    texts = read_prompts(prompts)
    from mini_infer.runtime.llm import LLM

    with LLM(**given(options)) as llm:
        if len(texts) == 1 and n == 1 and not json_lines:
            stream(llm, texts[0], params)
            return
        for output in llm.generate(texts, params, use_tqdm=sys.stderr.isatty()):
            show(output, json_lines)
