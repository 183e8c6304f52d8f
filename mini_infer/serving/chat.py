"""POST /v1/chat/completions: messages to a prompt, deltas to chunks, outputs to an answer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.outputs import RequestDelta, RequestOutput
from mini_infer.runtime.chat_messages import normalise_messages
from mini_infer.serving.answer import Envelope, usage_of
from mini_infer.serving.logprobs import chat_logprobs, prompt_logprobs
from mini_infer.serving.schema import ChatCompletionRequest

if TYPE_CHECKING:
    from mini_infer.runtime.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant")


def chat_prompt(tokenizer: "Tokenizer", body: ChatCompletionRequest) -> str:
    """A conversation in the format of the model's chat template, special tokens included.

    Raises:
        InvalidRequestError: a message that can't be rendered.
    """
    kwargs = body.chat_template_kwargs or {}
    for name in ("messages", "add_generation_prompt"):
        if name in kwargs:
            raise InvalidRequestError(
                f"give {name} as a field of its own, not in chat_template_kwargs",
                "chat_template_kwargs",
            )
    return tokenizer.apply_chat_template(
        plain_messages(body.messages), add_generation_prompt=body.add_generation_prompt, **kwargs
    )


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as every chat template knows them: a role and a text.

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
        for name in ("tool_calls", "function_call", "audio"):
            if message.get(name):
                raise InvalidRequestError(f"messages[{index}].{name} is not supported", "messages")
        role = "system" if role == "developer" else role
        plain.append({"role": role, "content": message["content"]})
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


class ChatChunks:
    """Formats the deltas of one request as the chunks of a streamed chat answer."""

    def __init__(self, envelope: Envelope, body: ChatCompletionRequest) -> None:
        self._envelope = envelope
        self._num_top = body.top_logprobs or 0
        self._started: set[int] = set()

    def __call__(self, delta: RequestDelta) -> Iterator[str]:
        if delta.index not in self._started:
            self._started.add(delta.index)
            first = {"role": "assistant", "content": ""}
            if delta.prompt_logprobs is None:
                yield self._event(delta, first)
            else:
                yield self._event(
                    delta, first, prompt_logprobs=prompt_logprobs(delta.prompt_logprobs)
                )
        if delta.text or delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._num_top) if delta.logprobs else None
            yield self._event(delta, {"content": delta.text}, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield self._event(
                delta, {}, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
            )

    def _event(self, delta: RequestDelta, content: dict[str, Any], **fields: Any) -> str:
        choice = {
            "index": delta.index,
            "delta": content,
            "logprobs": None,
            "finish_reason": None,
            **fields,
        }
        return self._envelope.event(choice)


def chat_answer(
    envelope: Envelope, body: ChatCompletionRequest, output: RequestOutput
) -> dict[str, Any]:
    """The whole answer of a chat request that isn't streamed."""
    answer = {
        **envelope.fields,
        "choices": [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.logprobs, body.top_logprobs or 0)
                if choice.logprobs is not None
                else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ],
        "usage": usage_of([output]),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    return answer
