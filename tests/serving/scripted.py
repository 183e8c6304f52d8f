"""A dry run that says a given text, and a tokenizer with a given model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mini_infer.runtime import dry_run
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.chat_template import ChatTemplates

HERMES = """
{%- if tools %}{{- '<|im_start|>system\\nCall as <tool_call>{"name": ..., "arguments": ...}' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' }}{{- call.function | tojson }}{{- '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- elif open_thinking is defined %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
"""As small as a template with the ways of Qwen3's can be."""


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Every answer of a dry run is ``text``."""
    monkeypatch.setattr(dry_run, "ANSWER_SENTENCES", (1, 1))
    monkeypatch.setattr(dry_run, "script_sentence", lambda key, index: text.encode())


def use_template(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, source: str, prompts: list[str] | None = None
) -> None:
    """Gives a ``ByteTokenizer`` a chat template; ``prompts`` collects what it renders."""
    assert isinstance(tokenizer, ByteTokenizer)
    templates = ChatTemplates({"default": source}, {})

    def render(messages: Sequence[Mapping[str, Any]], /, **kwargs: Any) -> str:
        prompt = templates.render(messages, **kwargs)
        if prompts is not None:
            prompts.append(prompt)
        return prompt

    monkeypatch.setattr(tokenizer, "apply_chat_template", render)
    monkeypatch.setattr(tokenizer, "chat_template_source", templates.source)
