"""Renders a model's own chat template: Jinja2 in a sandbox, with the helpers Hugging Face offers.

A template comes with a downloaded model, so it runs in ``ImmutableSandboxedEnvironment``: it can
neither reach Python's attributes nor change the caller's messages.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.json_file import read_json_object
from mini_infer.runtime.chat_messages import normalise_messages


def load_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a model folder by name; {} when there is none.

    A file beats ``tokenizer_config.json``: ``chat_template.jinja`` (and
    ``additional_chat_templates/NAME.jinja``), then ``chat_template.json``.
    """
    single = folder / "chat_template.jinja"
    wrapped = folder / "chat_template.json"
    if single.is_file():
        templates = {"default": single.read_text(encoding="utf-8")}
    elif wrapped.is_file():
        templates = _named(read_json_object(wrapped).get("chat_template"))
    else:
        templates = _named(tokenizer_config.get("chat_template"))
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates


def _named(value: Any) -> dict[str, str]:
    """Both forms that tokenizer_config.json knows: one string, or a list of name and template."""
    if not value:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        return {str(name): str(source) for name, source in value.items()}
    return {str(item["name"]): str(item["template"]) for item in value}


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here it only disappears."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2 declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja2's own filter it does not escape <, > and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplates:
    """A model's chat templates, compiled on first use.

    ``special_tokens`` (``bos_token``, ``eos_token``, ...) are variables of every template.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``; ``variables`` (``enable_thinking``, ...) reach the template.

        With ``tools`` a template named ``tool_use`` is preferred to ``default``.

        Raises:
            InvalidRequestError: malformed messages, no template, or a template that fails: its own
                ``raise_exception`` message is passed on.
        """
        template = self._template(self._name(bool(tools)))
        scope = {
            **self._special_tokens,
            **variables,
            "messages": normalise_messages(messages),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(scope)
        except Exception as error:
            # A template is a program: it may fail with any exception, on this conversation only.
            raise InvalidRequestError(
                f"the model's chat template refused this conversation: {error}", "messages"
            ) from error

    def source(self, with_tools: bool) -> str:
        """The text of the template that ``render`` uses with tools, or without; "" for none."""
        return self.sources.get(self._name(with_tools), "")

    def _name(self, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self.sources else "default"

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            if name not in self.sources:
                known = f" (it has {', '.join(self.sources)})" if self.sources else ""
                raise InvalidRequestError(
                    f"the model has no default chat template{known}: send a prompt to the "
                    "completions endpoint or LLM.generate, or use an instruct model",
                    "messages",
                )
            try:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise InvalidRequestError(
                    f"the model's chat template is not valid Jinja2: line {error.lineno}: {error}",
                    "messages",
                ) from error
        return self._compiled[name]
