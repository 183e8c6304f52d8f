"""The sampling options that ``generate`` and ``chat`` share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from mini_infer.core.sampling_params import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])
NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "ignore_eos",
)


def with_sampling_options(
    *, max_tokens: int | None, temperature: float
) -> Callable[[Function], Function]:
    """Adds the options of ``NAMES``. ``--seed`` is the engine's: it seeds unseeded requests."""
    limit = "the model's context" if max_tokens is None else str(max_tokens)
    options = (
        click.option(
            "--max-tokens", type=int, default=max_tokens, help=f"Longest answer. [default: {limit}]"
        ),
        click.option("--min-tokens", default=0, help="Shortest answer."),
        click.option(
            "--temperature", default=temperature, show_default=True, help="Randomness; 0 is greedy."
        ),
        click.option("--top-k", default=0, help="Keep the k likeliest tokens; 0 keeps all."),
        click.option("--top-p", default=1.0, help="Keep the likeliest tokens of this mass."),
        click.option("--min-p", default=0.0, help="Drop tokens below this share of the likeliest."),
        click.option("--presence-penalty", default=0.0, help="Penalty on tokens already used."),
        click.option("--frequency-penalty", default=0.0, help="Penalty on each earlier use."),
        click.option(
            "--repetition-penalty", default=1.0, help="Divides the logits of tokens already seen."
        ),
        click.option("--stop", multiple=True, help="End the answer before this text. Repeat."),
        click.option("--ignore-eos", is_flag=True, help="Go on to --max-tokens."),
    )

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def sampling_params(options: dict[str, Any], **more: Any) -> SamplingParams:
    """Takes the sampling options out of ``options``; what is left belongs to the engine.

    Raises:
        InvalidRequestError: a value out of range.
    """
    return SamplingParams(**{name: options.pop(name) for name in NAMES}, **more)
