"""A tokenizer without files: one token per UTF-8 byte. The dry run and the tests use it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer.runtime.chat_messages import normalise_messages
from mini_infer.runtime.tokenizer import decode_bytes
from mini_infer.runtime.unicode_text import utf8_bytes

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
TOOL_INSTRUCTION = (
    "For each call answer with "
    '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>'
)
TOKEN_BYTES = (*(bytes((byte,)) for byte in range(256)), *map(str.encode, SPECIAL_TOKENS))


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 and up are ``SPECIAL_TOKENS``. Imports nothing heavy.

    Special tokens are recognised in a text, as Hugging Face's tokenizers do, and none is added, as
    by the default model's. Conversations are written in ChatML.
    """

    vocab_size = 256 + len(SPECIAL_TOKENS)
    max_chars_per_token = max(map(len, SPECIAL_TOKENS))
    bos_token_id = 256
    eos_token_id: int | None = 257
    strips_leading_space = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._split(utf8_bytes(text), len(SPECIAL_TOKENS) - 1))

    def _split(self, data: bytes, special: int) -> list[int]:
        """Splits at the special tokens up to number ``special``; the rest are bytes."""
        if special < 0:
            return list(data)
        first, *others = data.split(SPECIAL_TOKENS[special].encode())
        token_ids = self._split(first, special - 1)
        for part in others:
            token_ids.append(256 + special)
            token_ids += self._split(part, special - 1)
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return decode_bytes(self, token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return TOKEN_BYTES[token_id] if 0 <= token_id < len(TOKEN_BYTES) else b""

    def is_special(self, token_id: int) -> bool:
        return 256 <= token_id < self.vocab_size

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """ChatML, with tools and calls as Hermes has them; ``kwargs`` have no effect on it."""
        turns = [
            (
                message["role"],
                message["content"] + "".join(map(_call, message.get("tool_calls", ()))),
            )
            for message in normalise_messages(messages)
        ]
        if tools:
            shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            turns.insert(0, ("system", f"<tools>\n{shown}\n</tools>\n{TOOL_INSTRUCTION}"))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def chat_template_source(self, with_tools: bool) -> str:
        """There is no template, only code; this is what one would show of ``tools`` and
        ``tool_calls``."""
        return f"tools, tool_calls: {TOOL_INSTRUCTION}"


def _call(call: Mapping[str, Any]) -> str:
    function = {name: call["function"][name] for name in ("name", "arguments")}
    return f"\n<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
