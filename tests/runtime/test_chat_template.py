"""Chat templates: equal to transformers' rendering, safe, and clear about what is wrong."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from mini_infer.core.errors import InvalidRequestError, UnsupportedModelError
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.chat_messages import cut_at_tag, normalise_messages, tag_final_message
from mini_infer.runtime.chat_template import ChatTemplates, load_chat_templates
from mini_infer.runtime.tokenizer import HFTokenizer

CHATML = (
    "{% for message in messages %}\n"
    "    {% if loop.first and message['role'] != 'system' %}\n"
    "{{ '<|im_start|>system\\nBe helpful<|im_end|>\\n' }}\n"
    "    {% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS_JSON = (
    "{{- bos_token }}\n"
    "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}|"
    "{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}\n"
    "{%- for message in messages %}\n"
    "  {%- if message.tool_calls is defined and message.tool_calls %}\n"
    "    {%- for call in message.tool_calls %}\n"
    "{{ call.function.name }}={{ call.function.arguments | tojson }}\n"
    "    {%- endfor %}\n"
    "  {%- else %}{{ message.role }}: {{ message.content | trim }}{{ eos_token }}{% endif %}\n"
    "{%- endfor %}"
)
LOOP_CONTROLS = (
    "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "{{ message.content }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
)
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}[{{ message.content }}]{% endif %}{% endfor %}"
)
DATE = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }} {{ enable_thinking }}"
DOCUMENTS = "{% for document in documents %}{{ document.text }};{% endfor %}{{ messages|length }}"
NAMESPACE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% set ns.last = loop.index0 %}"
    "{% endfor %}{{ messages[ns.last].content }}{{ messages[-1:] | map(attribute='role') | list }}"
)
TEMPLATES = [CHATML, TOOLS_JSON, LOOP_CONTROLS, GENERATION, DATE, DOCUMENTS, NAMESPACE]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": " You're <b>kind</b> & \u4f60\u597d\n"}
USER = {"role": "user", "content": "Capital of France?"}
ASSISTANT = {"role": "assistant", "content": "Paris."}
CONVERSATIONS = [[USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER]]
TOOL = {"type": "function", "function": {"name": "get", "description": "<a> & 'b' \u4f60"}}


def make_folder(folder: Path, config: dict[str, Any]) -> Path:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL_TOKENS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def render(source: str, messages: Any = (USER,), **kwargs: Any) -> str:
    return ChatTemplates({"default": source}, SPECIAL_TOKENS).render(list(messages), **kwargs)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_rendering_equals_transformers(
    tmp_path: Path, template: str, messages: list[dict[str, Any]]
) -> None:
    from transformers import AutoTokenizer

    make_folder(tmp_path, {"chat_template": template})
    tokenizer, reference = (
        HFTokenizer.from_folder(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    variables: dict[str, Any] = {
        "tools": [TOOL],
        "documents": [{"text": "one"}],
        "enable_thinking": False,
    }
    for add_generation_prompt in (True, False):
        assert tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **variables
        ) == reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )


@pytest.mark.parametrize("template", [CHATML, TOOLS_JSON, GENERATION])
@pytest.mark.parametrize("content", ["Paris", "It is ", " \n Well,\n\n", "Capital of France?"])
def test_continuing_a_message_equals_transformers(
    tmp_path: Path, template: str, content: str
) -> None:
    from transformers import AutoTokenizer

    make_folder(tmp_path, {"chat_template": template})
    tokenizer = HFTokenizer.from_folder(tmp_path)
    messages = [USER, {"role": "assistant", "content": content}]
    prompt = tokenizer.apply_chat_template(tag_final_message(messages), add_generation_prompt=False)
    assert cut_at_tag(prompt) == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )


@pytest.mark.parametrize("prompt", ["", "no tag"])
def test_a_prompt_without_the_final_message_is_not_continued(prompt: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not show") as caught:
        cut_at_tag(prompt)
    assert caught.value.param == "continue_final_message"


def test_calls_are_not_continued() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(InvalidRequestError, match="tool_calls can't be continued"):
        tag_final_message([{"role": "assistant", "tool_calls": [call]}])


def test_the_source_of_the_template_that_is_used() -> None:
    templates = ChatTemplates({"default": "a", "tool_use": "b"}, {})
    assert [templates.source(with_tools) for with_tools in (False, True)] == ["a", "b"]
    assert ChatTemplates({"default": "a"}, {}).source(with_tools=True) == "a"
    assert ChatTemplates({}, {}).source(with_tools=False) == ""


@pytest.mark.real_model
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_real_model_prompt_and_ids_equal_transformers(
    real_model_folder: Path, messages: list[dict[str, Any]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = HFTokenizer.from_folder(real_model_folder)
    reference = AutoTokenizer.from_pretrained(real_model_folder)
    prompt = tokenizer.apply_chat_template(messages)
    assert prompt == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode(prompt, add_special_tokens=False) == expected


def test_a_template_that_raises_passes_its_message_on() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    with pytest.raises(InvalidRequestError, match="no system role") as caught:
        render(source, [SYSTEM])
    assert caught.value.param == "messages"
    assert render(source, [USER]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages[0].content.no.such }}",
        "{{ messages | nofilter }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(InvalidRequestError, match="line 2"):
        render("fine\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{% for i in range(100000000) %}{% endfor %}",
    ],
)
def test_a_template_is_confined_to_its_sandbox(source: str) -> None:
    messages = [dict(USER)]
    before = copy.deepcopy(messages)
    with pytest.raises(InvalidRequestError):
        render(source, messages)
    assert messages == before


def test_no_template_says_so(tmp_path: Path) -> None:
    tokenizer = HFTokenizer.from_folder(make_folder(tmp_path, {}))
    with pytest.raises(InvalidRequestError, match="no default chat template"):
        tokenizer.apply_chat_template([USER])


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    tokenizer = HFTokenizer.from_folder(make_folder(tmp_path, {"chat_template": named}))
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], tools=[TOOL]) == "with tools"
    with pytest.raises(InvalidRequestError, match="it has tool_use"):
        ChatTemplates({"tool_use": ""}, {}).render([USER])


def test_template_files_beat_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "config"}
    assert load_chat_templates(tmp_path, {}) == {}
    assert load_chat_templates(tmp_path, config) == {"default": "config"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert load_chat_templates(tmp_path, config) == {"default": "json"}
    (tmp_path / "chat_template.jinja").write_text("jinja \u4f60", encoding="utf-8")
    assert load_chat_templates(tmp_path, config) == {"default": "jinja \u4f60"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_chat_templates(tmp_path, config)["tool_use"] == "tools"


def test_variables_of_any_name_reach_the_template_and_none_replaces_the_messages(
    tmp_path: Path,
) -> None:
    source = "{{ messages[0].content }} {{ self_ }} {{ x }}"
    tokenizer = HFTokenizer.from_folder(make_folder(tmp_path, {"chat_template": source}))
    variables = {"self": 1, "messages": [], "self_": 2, "x": "X"}
    assert tokenizer.apply_chat_template([USER], **variables) == f"{USER['content']} 2 X"
    assert USER["content"] in ByteTokenizer().apply_chat_template([USER], **variables)


def test_templates_by_name_in_an_object(tmp_path: Path) -> None:
    config = {"chat_template": {"default": "a", "tool_use": "b"}}
    assert load_chat_templates(tmp_path, config) == config["chat_template"]


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_malformed_template_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"chat_template\.json"):
        load_chat_templates(tmp_path, {})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "refusal", "refusal": "No."}], "No."),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_content_becomes_one_string(content: Any, text: str) -> None:
    messages = [{"role": "user", "content": content}]
    assert normalise_messages(messages) == [{"role": "user", "content": text}]
    assert f"user\n{text}<|im_end|>" in ByteTokenizer().apply_chat_template(messages)


def test_tool_arguments_are_parsed_without_changing_the_callers_message() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = copy.deepcopy(messages)
    assert normalise_messages(messages)[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert messages == before
    assert render(TOOLS_JSON, messages) == '<s>f={"x": 1}'


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("hello", "list"),
        (None, "list"),
        ({"role": "user", "content": "x"}, "list"),
        (["hello"], r"messages\[0\]"),
        ([USER, {"content": "x"}], r"messages\[1\].*'role'"),
        ([{"role": 1, "content": "x"}], "'role'"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": ["x"]}], "'str'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'text'"),
        ([{"role": "user", "content": [{"type": "refusal", "text": "x"}]}], "'refusal'"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}],
            "not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "not JSON",
        ),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        normalise_messages(messages)
    assert caught.value.param == "messages"
