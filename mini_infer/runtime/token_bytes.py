"""The raw bytes of one token, for the two families of tokenizers that language models use.

Byte-level BPE (GPT-2, Llama 3, Qwen) writes each byte as one printable character. Sentencepiece
(Llama 2, Gemma) writes a space as U+2581 and, with byte fallback, a byte outside its vocabulary as
``<0xAB>``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mini_infer.core.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True)
class TokenDecoder:
    """The ``decoder`` of a ``tokenizer.json``, as a function of one token."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strips_leading_space: bool = False

    @classmethod
    def from_json(cls, decoder: Mapping[str, Any] | None) -> "TokenDecoder":
        """Raises UnsupportedModelError: a decoder that is none of the two families."""
        steps = _flatten(decoder)
        kinds = [step["type"] for step in steps]
        replacements: list[tuple[str, str]] = []
        strips = False
        for step in steps:
            kind = step["type"]
            if kind == "Replace" and "String" in step["pattern"]:
                replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Metaspace":
                replacements.append((step.get("replacement", "\u2581"), " "))
                strips = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
                strips = True
            elif kind not in ("ByteLevel", "ByteFallback", "Fuse"):
                raise UnsupportedModelError(
                    f"tokenizer.json has the decoder {step}: only byte-level and sentencepiece "
                    "decoders (ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip of one "
                    "leading space) are supported"
                )
        return cls("ByteLevel" in kinds, "ByteFallback" in kinds, tuple(replacements), strips)

    def token_bytes(self, token: str) -> bytes:
        """Bytes of a token as its vocabulary spells it."""
        if self.byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, spelled as plain text
                return token.encode("utf-8")
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise UnsupportedModelError("tokenizer.json has no decoder: its tokens can't become text")
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]
