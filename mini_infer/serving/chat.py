"""POST /v1/chat/completions: messages to a prompt, deltas to chunks, outputs to an answer."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.outputs import CompletionOutput, FinishReason, RequestDelta, RequestOutput
from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.runtime.chat_messages import cut_at_tag, normalise_messages, tag_final_message
from mini_infer.serving.answer import Envelope, UsageSoFar, usage_of
from mini_infer.serving.held_calls import HeldHermesToolParser
from mini_infer.serving.logprobs import chat_logprobs, prompt_logprobs
from mini_infer.serving.messages import (
    MessageForm,
    MessageParser,
    RenderedChat,
    arguments_deltas,
    call_deltas,
    call_object,
    read_message,
)
from mini_infer.serving.reasoning import OPEN as OPEN_THOUGHTS
from mini_infer.serving.reasoning import (
    Reasoning,
    continues_reasoning,
    opens_reasoning,
    thoughts_after,
)
from mini_infer.serving.schema import ChatCompletionRequest
from mini_infer.serving.tool_calls import OPEN as OPEN_CALL
from mini_infer.serving.tool_calls import (
    TOOL_PARSERS,
    ArgumentsPiece,
    HermesToolParser,
    ToolCall,
    ToolParser,
    tool_parser_for,
)
from mini_infer.serving.tool_grammar import tool_grammar

if TYPE_CHECKING:
    from mini_infer.runtime.tokenizer import Tokenizer

AUTO = "auto"
ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT_FIELDS = {
    "assistant": ("tool_calls", "reasoning_content"),
    "tool": ("tool_call_id",),
}
"""What a template is told of besides role, content and name, where it is there."""
OWN_FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "tools")


def chat_prompt(
    tokenizer: "Tokenizer", body: ChatCompletionRequest, tool_call_parser: str = AUTO
) -> str:
    """A conversation in the format of the model's chat template, special tokens included.

    Leaves on ``body.rendered`` how the answers to it are read: calls by a parser of
    ``TOOL_PARSERS``, or by the one whose form the template teaches.

    Raises:
        InvalidRequestError: a message, or a tool, that can't be rendered.
    """
    body.set_rendered(render_chat(tokenizer, body, tool_call_parser))
    return body.rendered.prompt


def render_chat(
    tokenizer: "Tokenizer", body: ChatCompletionRequest, tool_call_parser: str = AUTO
) -> RenderedChat:
    """Raises InvalidRequestError: a message, or a tool, that can't be rendered."""
    variables = dict(body.chat_template_kwargs or {})
    for name in OWN_FIELDS:
        if name in variables:
            raise InvalidRequestError(
                f"give {name} as a field of its own, not in chat_template_kwargs",
                "chat_template_kwargs",
            )
    messages = plain_messages(body.messages)
    tools = body.usable_tools
    source = tokenizer.chat_template_source(bool(tools))
    if "tool_calls" not in source and any("tool_calls" in message for message in messages):
        raise InvalidRequestError(
            "messages with tool_calls are not supported by this model: its chat template does not "
            "show them",
            "messages",
        )
    if tools:
        variables["tools"] = tools
    continued = body.continue_final_message
    add_generation_prompt = body.add_generation_prompt
    prompt = tokenizer.apply_chat_template(
        tag_final_message(messages) if continued else messages,
        add_generation_prompt=not continued
        if add_generation_prompt is None
        else add_generation_prompt,
        **variables,
    )
    opened = opens_reasoning(prompt)
    if continued:
        prompt = cut_at_tag(prompt)
        opened = continues_reasoning(messages[-1]["content"])
    tags = [OPEN_THOUGHTS] if OPEN_THOUGHTS in source else []
    parser = _tool_parser(source, tool_call_parser) if tools else None
    tags += [OPEN_CALL] if parser is HermesToolParser else []
    held = _held(tokenizer, body, parser)
    if held is not None and OPEN_THOUGHTS in source:
        held = replace(held, thoughts=thoughts_after(prompt, opened, continued))
    holds_calls = held is not None and parser is HermesToolParser
    form = MessageForm(
        opens_reasoning=opened,
        tool_parser=HeldHermesToolParser if holds_calls else parser,
        is_named=body.read_tool_choice().name is not None,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        include_reasoning=body.include_reasoning,
        needs_special_tokens=any(_is_special(tokenizer, tag) for tag in tags),
    )
    return RenderedChat(prompt, tokenizer, form, held, bool(body.add_special_tokens))


def _held(
    tokenizer: "Tokenizer", body: ChatCompletionRequest, parser: Callable[[], ToolParser] | None
) -> StructuredOutputsParams | None:
    """The form that answers are held to: what the caller gave, or that of calls which must be made
    or must be right."""
    answer, tools, choice = body.output_form(), body.usable_tools, body.read_tool_choice()
    if parser is None:
        return answer
    if answer is None and not choice.required and not any(map(_is_strict, tools)):
        return None
    if choice.name is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == choice.name][:1]
    grammar = tool_grammar(
        tokenizer,
        parser,
        tools,
        required=choice.required,
        parallel=body.parallel_tool_calls is not False and choice.name is None,
        answer=None if answer is None else json.loads(answer.spec[1]),
    )
    return StructuredOutputsParams(grammar=grammar, place="tools")


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _is_special(tokenizer: "Tokenizer", tag: str) -> bool:
    return any(map(tokenizer.is_special, tokenizer.encode(tag, add_special_tokens=False)))


def _tool_parser(source: str, name: str) -> Callable[[], ToolParser]:
    if "tools" not in source:
        raise InvalidRequestError(
            "tools are not supported by this model: its chat template has no place for them",
            "tools",
        )
    parser = tool_parser_for(source) if name == AUTO else TOOL_PARSERS[name]
    if parser is None:
        raise InvalidRequestError(
            "tools are not supported by this model: its chat template asks for calls in a form "
            "that is not known here; Hermes' (Qwen2.5, Qwen3) and Llama 3's are, and the server "
            "can be told with --tool-call-parser which of them to read",
            "tools",
        )
    return parser


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: a role and a text, and what tools add to them.

    ``developer`` is OpenAI's newer name of ``system``; templates know only the latter.

    Raises:
        InvalidRequestError: no message, an unknown role, or content that isn't text.
    """
    plain = []
    for index, message in enumerate(normalise_messages(messages)):
        role = message["role"]
        if role not in ROLES:
            raise InvalidRequestError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}, got {role!r:.80}",
                "messages",
            )
        refused = ["function_call", "audio"] + ([] if role == "assistant" else ["tool_calls"])
        for name in refused:
            if message.get(name):
                raise InvalidRequestError(
                    f"messages[{index}].{name} is not supported for role {role}", "messages"
                )
        kept = {"role": "system" if role == "developer" else role, "content": message["content"]}
        for name in ("name", *KEPT_FIELDS.get(role, ())):
            value = message.get(name)
            if name == "reasoning_content" and value is None:
                value = message.get("reasoning")  # vLLM's newer name of it
            if name != "tool_calls" and value is not None and not isinstance(value, str):
                raise InvalidRequestError(
                    f"messages[{index}].{name} must be a string, got {value!r:.80}", "messages"
                )
            if value:
                kept[name] = value
        plain.append(kept)
    return plain


def text_length(value: Any) -> int:
    """Characters in all strings of a JSON value, valid or not as messages, however deep."""
    length = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str):
            length += len(item)
    return length


@dataclass(slots=True)
class _Choice:
    """A choice while its chunks are sent."""

    parser: MessageParser
    num_calls: int = 0

    def contents(self, delta: RequestDelta) -> list[dict[str, Any]]:
        """The ``delta`` of each chunk that news of this choice become."""
        parts = self.parser.append(delta.text)
        if delta.finish_reason is not None:
            parts += self.parser.finish()
        contents: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, ToolCall):
                contents += call_deltas(self.num_calls, part)
                self.num_calls += 1
            elif isinstance(part, ArgumentsPiece):
                contents += arguments_deltas(self.num_calls - 1, part.text)
            elif isinstance(part, Reasoning):
                contents.append({"reasoning_content": part.text})
            else:
                contents.append({"content": part})
        return contents


class ChatChunks:
    """Formats the deltas of one request as the chunks of a streamed chat answer."""

    def __init__(self, envelope: Envelope, body: ChatCompletionRequest) -> None:
        envelope.extend(body.answer_fields)
        self._envelope = envelope
        self._num_top = body.top_logprobs or 0
        self._rendered = body.rendered
        self._returns_token_ids = bool(body.return_token_ids)
        self._usage = UsageSoFar() if body.continuous_usage else None
        self._choices: dict[int, _Choice] = {}

    def __call__(self, delta: RequestDelta) -> Iterator[str]:
        choice = self._choices.get(delta.index)
        if choice is None:
            beside: dict[str, Any] = {}
            if self._returns_token_ids and not self._choices:
                beside["prompt_token_ids"] = self._rendered.token_ids(delta.num_prompt_tokens)
            choice = self._choices[delta.index] = _Choice(MessageParser(self._rendered.form))
            fields: dict[str, Any] = {}
            if delta.prompt_logprobs is not None:
                fields["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs)
            yield self._event(delta, {"role": "assistant", "content": ""}, beside, **fields)
        if self._usage is not None:
            self._usage.add(delta.index, delta)
        fields = {}
        if delta.logprobs:
            fields["logprobs"] = chat_logprobs(delta.logprobs, self._num_top)
        if self._returns_token_ids and delta.token_ids:
            fields["token_ids"] = delta.token_ids
        contents = choice.contents(delta)
        if fields and not contents:
            contents.append({"content": ""})  # the text is held back
        for content in contents:
            yield self._event(delta, content, **fields)
            fields = {}
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, choice.num_calls, self._rendered.form)
            yield self._event(delta, {}, finish_reason=reason, stop_reason=delta.stop_reason)

    def _event(
        self,
        delta: RequestDelta,
        content: dict[str, Any],
        beside: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        choice = {
            "index": delta.index,
            "delta": content,
            "logprobs": None,
            "finish_reason": None,
            **fields,
        }
        usage = None if self._usage is None else self._usage.get(delta.index, delta)
        return self._envelope.event(choice, usage, **(beside or {}))


def finish_reason(reason: FinishReason | None, num_calls: int, form: MessageForm) -> str | None:
    """OpenAI's: an answer that calls and then stops, stops for its calls, unless it had to make
    the one that the caller named."""
    called = num_calls and not form.is_named
    return "tool_calls" if called and reason == "stop" else reason


def chat_answer(
    envelope: Envelope, body: ChatCompletionRequest, output: RequestOutput
) -> dict[str, Any]:
    """The whole answer of a chat request that isn't streamed."""
    answer = {
        **envelope.fields,
        **body.answer_fields,
        "choices": [_answer_choice(body, choice) for choice in output.outputs],
        "usage": usage_of([output]),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return answer


def _answer_choice(body: ChatCompletionRequest, choice: CompletionOutput) -> dict[str, Any]:
    parts = read_message(body.rendered.form, choice.text)
    # OpenAI's null: there is something, but no text.
    has_content = bool(parts.content) or not choice.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": parts.content if has_content else None,
        "refusal": None,
    }
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    if parts.calls:
        message["tool_calls"] = [call_object(call) for call in parts.calls]
    answer = {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(choice.logprobs, body.top_logprobs or 0)
        if choice.logprobs is not None
        else None,
        "finish_reason": finish_reason(choice.finish_reason, len(parts.calls), body.rendered.form),
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        answer["token_ids"] = choice.token_ids
    return answer
