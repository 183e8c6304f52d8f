"""Engine options of the command line, generated from ``EngineConfig``: one source of truth."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from mini_infer.core.engine_config import AUTO, engine_options
from mini_infer.core.speculative_config import SpeculativeConfig

Function = TypeVar("Function", bound=Callable[..., Any])


class AutoChoice(click.ParamType[str]):
    """One of the choices, or ``auto``, which is the same as not giving the option."""

    name = "choice"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join((AUTO, *self.choices))}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value != AUTO and value not in self.choices:
            known = ", ".join((AUTO, *self.choices))
            raise click.BadParameter(f"{value!r} is not one of {known}", ctx, param)
        return str(value)


class AutoNumber(click.ParamType[float | str]):
    """A number, whole or not, or ``auto``."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind
        self.name = "integer" if kind is int else "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        if value == AUTO:
            return AUTO
        try:
            return self.kind(value)
        except ValueError:
            rule = "a whole number" if self.kind is int else "a number"
            raise click.BadParameter(f"{value!r} is not {rule} (or {AUTO})", ctx, param) from None


def engine_option(name: str, metadata: Mapping[str, Any]) -> Callable[[Function], Function]:
    """The click option of one field. Not given means absent: the engine's resolver decides."""
    flag = "--" + name.replace("_", "-")
    default, kind, choices = metadata["default"], metadata["kind"], metadata["choices"]
    text = metadata["help"]
    if kind is bool:
        shown = "on" if default else "off"
        # --enable-x and --no-enable-x as vLLM has them, and the shorter --x and --no-x.
        spellings = dict.fromkeys((flag.replace("--enable-", "--"), flag))
        declarations = [f"{item}/--no-{item.removeprefix('--')}" for item in spellings]
        return click.option(*declarations, name, default=None, help=f"{text} [default: {shown}]")
    value_type: click.ParamType[Any]
    if choices:
        value_type = AutoChoice(choices)
    elif kind in (int, float) and not name.endswith("_memory"):
        value_type = AutoNumber(kind)
    else:  # the engine's resolver reads an amount of memory, such as 2GiB, and JSON
        value_type = click.STRING
    shown = "" if default is None else f" [default: {default}]"
    metavar = "JSON" if kind is SpeculativeConfig else None
    return click.option(
        flag, name, type=value_type, default=None, metavar=metavar, help=text + shown
    )


def with_engine_options(function: Function) -> Function:
    """Adds every engine option; the command receives them as keyword arguments, unset ones None."""
    for name, metadata in reversed(engine_options().items()):
        function = engine_option(name, metadata)(function)
    return function


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Only what the user said, for ``LLM(**options)`` and ``LLMEngine.from_options``."""
    return {name: value for name, value in options.items() if value not in (None, AUTO)}
