"""Tokenizers built here: ids and text equal to transformers', bytes per token, special tokens."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mini_infer.core.errors import InvalidRequestError, ModelNotFoundError, UnsupportedModelError
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.token_bytes import BYTE_OF_CHAR, TokenDecoder
from mini_infer.runtime.tokenizer import HFTokenizer, Tokenizer

CORPUS = [
    "Paris is the capital of France, and Berlin is the capital of Germany.",
    "def main():\n    print('hello world')\n",
    "naïve café déjà vu — 12 345",
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f600\U0001f680",
]
SPECIAL = ["<|start|>", "<|end|>"]
TEXTS = [
    "Paris is the capital of France.",
    " leading and  double  spaces ",
    "café \u4f60\u597d \U0001f600 \U0001f469\u200d\U0001f680",
    "x  12\n\n7\ttab",
    "<|start|>user\nhi<|end|>\n",
    "zero\x00byte \ufffd replacement",
    "a",
]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's: metaspace by normaliser, byte fallback, one leading space stripped."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        CORPUS[:2],
        trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


BYTE_LEVEL_CONFIG = {
    "eos_token": "<|end|>",
    "bos_token": {"__type": "AddedToken", "content": "<|start|>"},
}
SENTENCEPIECE_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "byte_level": (byte_level, BYTE_LEVEL_CONFIG),
    "sentencepiece": (sentencepiece, SENTENCEPIECE_CONFIG),
}


def save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build, config = KINDS[request.param]
    return save(tmp_path_factory.mktemp(request.param), build(), config)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HFTokenizer:
    return HFTokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(tokenizer: HFTokenizer, reference: Any, text: str) -> None:
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == reference.encode(text, add_special_tokens=special)
        for skip in (True, False):
            expected = reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_sizes_and_special_tokens_equal_transformers(
    tokenizer: HFTokenizer, reference: Any
) -> None:
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.bos_token_id == reference.bos_token_id
    special = {index for index in range(tokenizer.vocab_size) if tokenizer.is_special(index)}
    assert special == set(reference.all_special_ids)


def test_any_valid_text_survives(tokenizer: HFTokenizer) -> None:
    @settings(deadline=None)
    @given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    check()


def test_byte_level_decoding_of_any_ids_equals_the_tokenizers_library() -> None:
    backend = byte_level()
    tokenizer = HFTokenizer(backend, BYTE_LEVEL_CONFIG, {})

    @settings(deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)

    check()


def test_byte_table_covers_every_byte_once() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert set(BYTE_OF_CHAR) == set(pre_tokenizers.ByteLevel.alphabet())


def test_token_bytes(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.encode("\U0001f680", add_special_tokens=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data.removeprefix(b" ") == "\U0001f680".encode()
    assert tokenizer.token_bytes(tokenizer.eos_token_id or 0).startswith(b"<")
    for unknown in (-1, tokenizer.vocab_size, 10**9):
        assert tokenizer.token_bytes(unknown) == b""
    assert tokenizer.decode([*ids, 10**9, -1]) == "\U0001f680"


@pytest.mark.parametrize(
    ("decoder", "token", "data"),
    [
        (decoders.ByteLevel(), "\u0120Paris", b" Paris"),
        (decoders.ByteLevel(), "<|\u4f60|>", "<|\u4f60|>".encode()),  # an added token
        (decoders.Metaspace(), "\u2581Paris", b" Paris"),
        (decoders.Metaspace(), "<0xE2>", b"<0xE2>"),  # no byte fallback
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "<0xE2>", b"\xe2"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "<0xE2>x", b"<0xE2>x"),
    ],
)
def test_token_bytes_by_decoder(decoder: Any, token: str, data: bytes) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoder
    description = json.loads(backend.to_str())["decoder"]
    assert TokenDecoder.from_json(description).token_bytes(token) == data


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        (decoders.Metaspace(prepend_scheme="always"), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (decoders.Replace("\u2581", " "), False),
        (decoders.Strip(" ", 1, 0), True),
    ],
)
def test_leading_space_is_stripped_as_the_decoder_says(decoder: Any, strips: bool) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"\u2581a": 0, "b": 1}, []))
    backend.decoder = decoder
    tokenizer = HFTokenizer(backend, {}, {})
    assert tokenizer.strips_leading_space is strips
    assert tokenizer.decode([0, 1, 0]) == backend.decode([0, 1, 0])


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Strip("x", 1, 0), None])
def test_other_decoders_are_refused(decoder: Any, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match="decoder"):
        HFTokenizer.from_folder(save(tmp_path, backend, {}))


def test_tokens_declared_only_in_the_config_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    backend = byte_level()
    size = backend.get_vocab_size()
    backend.add_tokens(["<tool>"])  # added, and not special
    config = {
        **BYTE_LEVEL_CONFIG,
        "eos_token": "<|eot|>",
        "pad_token": "<tool>",
        "added_tokens_decoder": {
            str(size): {"content": "<tool>", "special": False, "normalized": False},
            str(size + 1): {"content": "<|eot|>", "special": True, "normalized": False},
            str(size + 2): {"content": "<think>", "special": False, "normalized": False},
        },
    }
    save(tmp_path, backend, config)
    tokenizer, reference = (
        HFTokenizer.from_folder(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    text = "a<tool>b<|eot|>c<think>d<|start|>"
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.eos_token_id == reference.eos_token_id == size + 1
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "abc<think>d"


def test_special_tokens_map_is_read_and_the_config_beats_it(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), {"eos_token": None, "bos_token": "<|start|>"})
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "bos_token": "<|end|>"})
    )
    tokenizer = HFTokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_id == tokenizer.encode("<|end|>")[0]
    assert tokenizer.bos_token_id == tokenizer.encode("<|start|>")[0]


def test_add_bos_token_of_the_config_is_honoured_once(tmp_path: Path) -> None:
    config = {**BYTE_LEVEL_CONFIG, "add_bos_token": True}
    tokenizer = HFTokenizer.from_folder(save(tmp_path, byte_level(), config))
    bos = tokenizer.bos_token_id
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [bos, *plain]
    assert tokenizer.encode("<|start|>hi") == [bos, *plain]


def test_saved_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = HFTokenizer.from_folder(save(tmp_path, backend, BYTE_LEVEL_CONFIG))
    plain = HFTokenizer(byte_level(), BYTE_LEVEL_CONFIG, {})
    assert tokenizer.encode(CORPUS[0]) == plain.encode(CORPUS[0])


def test_one_that_was_used_can_be_sent_to_another_process() -> None:
    """Compiled templates are code: the first chat kept every form of output from being tried."""
    templates = {"default": "{{ messages[0]['content'] }}"}
    tokenizer = HFTokenizer(byte_level(), BYTE_LEVEL_CONFIG, templates)
    messages = [{"role": "user", "content": "Hello"}]
    asked = tokenizer.apply_chat_template(messages), tokenizer.token_bytes(5)
    sent: HFTokenizer = pickle.loads(pickle.dumps(tokenizer))
    assert (sent.apply_chat_template(messages), sent.token_bytes(5)) == asked
    assert sent.encode("Hello") == tokenizer.encode("Hello")


def test_longest_token_bounds_the_characters_of_a_text(tokenizer: HFTokenizer) -> None:
    for text in [*TEXTS, *CORPUS]:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert len(text) <= num_tokens * tokenizer.max_chars_per_token


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        HFTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_malformed_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    save(tmp_path, byte_level(), BYTE_LEVEL_CONFIG)
    (tmp_path / name).write_text(content)
    with pytest.raises(UnsupportedModelError, match=name):
        HFTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"400": {}}},
        {"added_tokens_decoder": {"x": {"content": "x"}}},
        {"added_tokens_decoder": ["x"]},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": 5},
    ],
)
def test_a_config_of_the_wrong_shape_is_a_typed_error(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    save(tmp_path, byte_level(), {**BYTE_LEVEL_CONFIG, **config})
    with pytest.raises(UnsupportedModelError, match=r"tokenizer_config\.json is malformed"):
        HFTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "extra",
    [
        {"additional_special_tokens": ["<img>", {"content": "<eoi>"}]},
        {"extra_special_tokens": {"image_token": "<img>", "end_token": "<eoi>"}},
    ],
)
def test_further_special_tokens_of_the_config(tmp_path: Path, extra: dict[str, Any]) -> None:
    folder = save(tmp_path, byte_level(), {**BYTE_LEVEL_CONFIG, **extra})
    tokenizer = HFTokenizer.from_folder(folder)
    ids = tokenizer.encode("<img><eoi>")
    assert len(ids) == 2
    assert all(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids) == ""


@pytest.mark.parametrize("kind", ["bytes", "byte_level"])
def test_half_a_surrogate_pair_is_a_typed_error(kind: str) -> None:
    tokenizer: Tokenizer = (
        ByteTokenizer() if kind == "bytes" else HFTokenizer(byte_level(), BYTE_LEVEL_CONFIG, {})
    )
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


@pytest.mark.real_model
@pytest.mark.parametrize("text", [*TEXTS, *CORPUS, "3.14159, 2026-01-01 & 100%", "\n\n\n   x"])
def test_real_model_ids_and_text_equal_transformers(real_model_folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = HFTokenizer.from_folder(real_model_folder)
    reference = AutoTokenizer.from_pretrained(real_model_folder)
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eos_token_id == reference.eos_token_id
