"""GGUF metadata -> tokenizer files in Hugging Face format, with the file's own pre-tokenizer.

A byte-level BPE is its vocabulary, its merges *and* the rule that splits text before merging.
GGUF names that rule in ``tokenizer.ggml.pre``; losing it gives other ids for digits and newlines.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from mini_infer.core.errors import UnsupportedModelError, WeightsError
from mini_infer.modeling.gguf_file import GGUFFile

# Values of tokenizer.ggml.token_type.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer wherever they appear, as in llama.cpp."""


@dataclass(frozen=True)
class PreTokenizer:
    """How one ``tokenizer.ggml.pre`` splits text: each pattern splits the last one's pieces."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a vocabulary entry is taken whole (Llama 3)."""
    add_bos: bool = False
    """Where ``tokenizer.ggml.add_bos_token`` is absent."""
    nfc: bool = False
    """Text is brought into Unicode's composed form first."""


_LLAMA3 = PreTokenizer((LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2_SPLIT,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer((QWEN2_SPLIT,), nfc=True),
    "smollm": PreTokenizer((r"\p{N}", GPT2_SPLIT)),
    "starcoder": PreTokenizer((r"\p{N}", GPT2_SPLIT)),
}


def find_pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    """The file's splitting rule.

    Raises:
        UnsupportedModelError: not a byte-level BPE, or a rule that is unknown or not named.
    """
    model = file.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported, only 'gpt2' "
            "(byte-level BPE)"
        )
    name = file.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.pre {name!r} is not supported, only "
            f"{', '.join(sorted(PRE_TOKENIZERS))}; another rule would give wrong token ids"
        )
    return PRE_TOKENIZERS[name]


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        UnsupportedModelError: see ``find_pre_tokenizer``.
        WeightsError: vocabulary and merges contradict each other.
    """
    rule = find_pre_tokenizer(file)
    tokens = file.require("tokenizer.ggml.tokens")
    token_types = _token_types(file, tokens)
    # Rows that pad the embedding have a type of their own and are no part of the vocabulary.
    vocab = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, token_types, strict=True))
        if kind != UNUSED
    }
    merges = [_pair(file, merge) for merge in file.require("tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    except Exception as error:  # the Rust side raises bare Exception
        raise WeightsError(f"{file.path}: vocabulary and merges disagree: {error}") from None
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, token_types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    tokenizer.post_processor = _post_processor(file, rule, tokens)
    return tokenizer


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """``tokenizer_config.json``; the class is the one that takes tokenizer.json as it stands."""
    rule = find_pre_tokenizer(file)
    tokens = file.require("tokenizer.ggml.tokens")
    token_types = _token_types(file, tokens)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.architecture}.context_length"),
        "add_bos_token": _adds(file, "bos", rule.add_bos),
        "add_eos_token": _adds(file, "eos", False),
        "added_tokens_decoder": {
            str(token_id): {
                "content": token,
                "special": kind != USER_DEFINED,
                "normalized": False,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
            for token_id, (token, kind) in enumerate(zip(tokens, token_types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        },
    }
    for name, key in (
        ("bos", "bos_token_id"),
        ("eos", "eos_token_id"),
        ("unk", "unknown_token_id"),
        ("pad", "padding_token_id"),
    ):
        if (token_id := _token_id(file, key, len(tokens))) is not None:
            config[f"{name}_token"] = tokens[token_id]
    if (template := file.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """``generation_config.json``: with every token that ends an answer."""
    tokens = file.require("tokenizer.ggml.tokens")
    token_types = _token_types(file, tokens)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [_token_id(file, key, len(tokens)) for key in keys]
    ends = [token_id for token_id in named if token_id is not None]
    # The prompt's own separator (SmolLM2 begins with <|im_start|>) is never among them.
    ends += [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, token_types, strict=True))
        if kind == CONTROL and token in END_OF_TURN
    ]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    for name, key in (("bos", "bos_token_id"), ("pad", "padding_token_id")):
        if (token_id := _token_id(file, key, len(tokens))) is not None:
            config[f"{name}_token_id"] = token_id
    return config


def _token_types(file: GGUFFile, tokens: list[str]) -> list[int]:
    token_types: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(token_types) != len(tokens):
        raise WeightsError(f"{file.path}: {len(tokens)} tokens, but {len(token_types)} types")
    return token_types


def _token_id(file: GGUFFile, key: str, num_tokens: int) -> int | None:
    token_id = file.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    if not 0 <= token_id < num_tokens:
        raise WeightsError(f"{file.path}: {key} {token_id} is outside the vocabulary")
    return int(token_id)


def _pair(file: GGUFFile, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise WeightsError(f"{file.path}: tokenizer merge {merge!r} is not a pair")
    return left, right


def _adds(file: GGUFFile, name: str, default: bool) -> bool:
    """Is the ``bos`` or ``eos`` token added to every encoded text?"""
    return bool(
        file.get(f"tokenizer.ggml.add_{name}_token", default)
        and file.get(f"tokenizer.ggml.{name}_token_id") is not None
    )


def _post_processor(file: GGUFFile, rule: PreTokenizer, tokens: list[str]) -> Any:
    byte_level = processors.ByteLevel(trim_offsets=False)
    special: list[tuple[str, int]] = []
    single, pair = "$A", "$B:1"
    for name, default in (("bos", rule.add_bos), ("eos", False)):
        token_id = _token_id(file, f"{name}_token_id", len(tokens))
        if token_id is None or not _adds(file, name, default):
            continue
        token = tokens[token_id]
        special.append((token, token_id))
        single = f"{token} {single}" if name == "bos" else f"{single} {token}"
        pair = f"{token}:1 {pair}" if name == "bos" else f"{pair} {token}:1"
    if not special:
        return byte_level
    template = processors.TemplateProcessing(
        single=single.split(" "), pair=f"{single} {pair}".split(" "), special_tokens=special
    )
    return processors.Sequence([byte_level, template])
