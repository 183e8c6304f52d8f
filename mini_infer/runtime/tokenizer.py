"""Text to token ids and back: the interface, and Hugging Face's ``tokenizer.json`` behind it.

The ``tokenizers`` library does the encoding. Decoding is ours and works on bytes: every token has
raw bytes of its own, and a text is their concatenation read as UTF-8. That is what makes decoding
incremental in linear time (``detokenizer.py``). transformers is not imported: it takes seconds.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mini_infer.core.errors import ModelNotFoundError, UnsupportedModelError
from mini_infer.core.json_file import read_json_object
from mini_infer.runtime.token_bytes import TokenDecoder
from mini_infer.runtime.unicode_text import utf8_bytes

if TYPE_CHECKING:
    import tokenizers

    from mini_infer.runtime.chat_template import ChatTemplates

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer. Implementations are read-only after construction."""

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1, added tokens included."""

    @property
    def max_chars_per_token(self) -> int:
        """The longest token's length: a longer text surely has more tokens than its share."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def strips_leading_space(self) -> bool:
        """Does a text lose its first space, as sentencepiece's dummy prefix asks?"""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequestError for text that is not valid Unicode."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Incomplete or invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are ignored."""

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token, perhaps a part of a character; b"" for an unknown id."""

    def is_special(self, token_id: int) -> bool: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; encode it with ``add_special_tokens=False``.

        Raises InvalidRequestError: no template, or one that refuses these messages.
        """

    def chat_template_source(self, with_tools: bool) -> str:
        """The text of the template for conversations with tools, or without; "" for none."""


def decode_bytes(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """``Tokenizer.decode`` in terms of ``token_bytes``."""
    data = b"".join(
        tokenizer.token_bytes(token_id)
        for token_id in token_ids
        if not (skip_special_tokens and tokenizer.is_special(token_id))
    )
    if tokenizer.strips_leading_space:
        data = data.removeprefix(b" ")
    return data.decode("utf-8", errors="replace")


class HFTokenizer:
    """A tokenizer from a folder in Hugging Face format.

    It reads ``tokenizer.json``, and for the special tokens and the chat template also
    ``tokenizer_config.json``, ``special_tokens_map.json`` and ``chat_template.*``. Invalid byte
    sequences decode to one U+FFFD per ill-formed part, also for byte-fallback tokenizers, where
    ``tokenizers`` would replace each byte of the whole run.
    """

    def __init__(
        self, backend: "tokenizers.Tokenizer", config: Mapping[str, Any], templates: dict[str, str]
    ) -> None:
        self._backend = backend
        self.special_tokens = _declared_special_tokens(config)
        _add_declared_tokens(backend, config, self.special_tokens)
        # Some folders were saved with their training's cut-off and padding.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._special_ids = {index for index, token in added.items() if token.special}
        vocab = backend.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so the largest counts, not how many there are.
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_chars_per_token = max(map(len, vocab), default=1)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._adds_bos = bool(config.get("add_bos_token")) and self.bos_token_id is not None
        # A decoder pickles as its JSON; the whole tokenizer's JSON takes a quarter of a second.
        state = b"null" if backend.decoder is None else backend.decoder.__getstate__()
        self._decoder = TokenDecoder.from_json(json.loads(state))
        self.strips_leading_space = self._decoder.strips_leading_space
        self._token_bytes: dict[int, bytes] = {}
        self._template_sources = templates

    @classmethod
    def from_folder(cls, folder: Path) -> "HFTokenizer":
        """Raises:
        ModelNotFoundError: the folder has no ``tokenizer.json``.
        UnsupportedModelError: a file is malformed, or the decoder is none of those implemented.
        """
        import tokenizers

        from mini_infer.runtime.chat_template import load_chat_templates

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelNotFoundError(
                f"{folder} has no tokenizer.json: save the model's tokenizer there with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise UnsupportedModelError(f"{path} can't be read: {error}") from None
        config: dict[str, Any] = {}
        for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
            declared = read_json_object(file) if file.is_file() else {}
            config |= {name: value for name, value in declared.items() if value is not None}
        try:
            return cls(backend, config, load_chat_templates(folder, config))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{folder / 'tokenizer_config.json'} is malformed: {type(error).__name__}: {error}"
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        utf8_bytes(text)  # the backend would raise an error of its own
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        # Older Llama folders declare the first token only in tokenizer_config.json.
        if add_special_tokens and self._adds_bos and bos is not None and token_ids[:1] != [bos]:
            return [bos, *token_ids]
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return decode_bytes(self, token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        data = self._token_bytes.get(token_id)
        if data is None:
            known = 0 <= token_id < self.vocab_size
            token = self._backend.id_to_token(token_id) if known else None
            data = b"" if token is None else self._decoder.token_bytes(token)
            if known:
                self._token_bytes[token_id] = data
        return data

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without what is made when it is first asked for. Compiled templates
        are code, which can't be sent."""
        state = dict(self.__dict__)
        state.pop("_chat_templates", None)
        return {**state, "_token_bytes": {}}

    @cached_property
    def _chat_templates(self) -> "ChatTemplates":
        from mini_infer.runtime.chat_template import ChatTemplates

        return ChatTemplates(self._template_sources, self.special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        return self._chat_templates.render(
            messages, add_generation_prompt=add_generation_prompt, **kwargs
        )

    def chat_template_source(self, with_tools: bool) -> str:
        return self._chat_templates.source(with_tools)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _content(token: Any) -> str | None:
    """A special token is written as a string, or as an object with its ``content``."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _declared_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    declared = {name: _content(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
    return {name: token for name, token in declared.items() if token is not None}


def _add_declared_tokens(
    backend: "tokenizers.Tokenizer", config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Registers what ``tokenizer_config.json`` declares beyond ``tokenizer.json``.

    A declared token is matched whole in a text, and one that is special is left out of outputs;
    transformers does the same.
    """
    from tokenizers import AddedToken

    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    names = list(special_tokens.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or ()
        names += filter(
            None, map(_content, extra.values() if isinstance(extra, Mapping) else extra)
        )
    for _, entry in sorted(
        (config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])
    ):
        if entry["content"] not in known:
            options = {
                key: entry[key] for key in ("lstrip", "rstrip", "normalized") if key in entry
            }
            token = AddedToken(entry["content"], special=entry.get("special", False), **options)
            backend.add_tokens([token])
            known[token.content] = token
    for name in names:
        token = known.get(name) or AddedToken(name, normalized=False)
        if not token.special:
            backend.add_special_tokens([token])
