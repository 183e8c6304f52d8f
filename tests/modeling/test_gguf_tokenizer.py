"""Tokenizers out of GGUF files: the split before merging, special tokens, and both loaders."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, pre_tokenizers

from mini_infer.core.errors import UnsupportedModelError, WeightsError
from mini_infer.modeling.gguf_convert import write_config_folder
from mini_infer.modeling.gguf_file import GGUFFile
from mini_infer.modeling.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer, generation_config
from tests.modeling.gguf_files import (
    BOS,
    EOS,
    TEMPLATE,
    TOKENS,
    tiny_model,
    tokenizer_metadata,
    write_gguf,
    write_model,
)

STRINGS = [
    "x  12",
    "\n\n7",
    "x 1234!!",
    "he said: hehe",
    "Café\u0301 e\u0301",
    "日本語 🎉",
    "½ Ⅷ ٣ 1234567",
    "<|im_start|>he 12<|im_end|>\n",
    "a<think>12\n\n\n",
    "\t \n x\r\n",
    "don't WE'LL",
    "   ",
    "",
]


def tokenizer_of(tmp_path: Path, pre: str | None = "smollm", **changes: Any) -> Tokenizer:
    path = write_gguf(tmp_path / "t.gguf", "llama", tokenizer_metadata(pre, **changes), {})
    return build_tokenizer(GGUFFile(path))


# The vocabulary merges digits up to 1234, two newlines, two spaces, two exclamation marks and
# "Ġhe": which of them happen shows where the text was split first.
PIECES = {
    "smollm": {
        "x 1234": ["x", "Ġ", "1", "2", "3", "4"],
        "\n\n7": ["ĊĊ", "7"],
        "a\n\n b": ["a", "ĊĊ", "Ġ", "b"],
        "!!\n": ["!!", "Ċ"],
    },
    "gpt-2": {
        "x 1234": ["x", "Ġ", "1234"],
        "\n\n7": ["Ċ", "Ċ", "7"],
        "a\n\n b": ["a", "ĊĊ", "Ġ", "b"],
        "!!\n": ["!!", "Ċ"],
    },
    "default": {
        "x 1234": ["x", "Ġ", "123", "4"],
        "\n\n7": ["Ċ", "Ċ", "7"],
        "a\n\n b": ["a", "ĊĊ", "Ġ", "b"],
        " !!": ["Ġ", "!!"],
    },
    "llama-bpe": {
        "x 1234": ["x", "Ġ", "123", "4"],
        "\n\n7": ["ĊĊ", "7"],
        "a\n\n b": ["a", "ĊĊ", "Ġ", "b"],
        "HE'LL": ["H", "E", "'", "L", "L"],
    },
    "qwen2": {
        "x 1234": ["x", "Ġ", "1", "2", "3", "4"],
        "\n\n7": ["ĊĊ", "7"],
        "a\n\n b": ["a", "ĊĊ", "Ġ", "b"],
        "e\u0301": ["Ã©"],  # composed first
    },
}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [(pre, text, pieces) for pre, cases in PIECES.items() for text, pieces in cases.items()],
)
def test_regression_19_each_pre_tokenizer_splits_in_its_own_way(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    tokenizer = tokenizer_of(tmp_path, pre)
    assert tokenizer.encode(text, add_special_tokens=False).tokens == pieces


@pytest.mark.parametrize("text", STRINGS)
def test_regression_19_smollm_is_digits_then_byte_level(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_of(tmp_path)
    found = tokenizer.encode(text).ids
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    assert found == tokenizer.encode(text).ids


@pytest.mark.parametrize("text", STRINGS)
def test_gpt_2_is_the_librarys_byte_level(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_of(tmp_path, "gpt-2")
    found = tokenizer.encode(text).ids
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert found == tokenizer.encode(text).ids


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_regression_19_the_folder_keeps_the_pre_tokenizer(
    tmp_path: Path, pre: str, family: str
) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model(family), pre)
    folder = write_config_folder(path, tmp_path / "out")
    # For the model type qwen2 AutoTokenizer always takes Qwen's own split, whatever a folder says.
    loader = transformers.AutoTokenizer
    if family == "qwen2" and pre != "qwen2":
        loader = transformers.PreTrainedTokenizerFast
    theirs = loader.from_pretrained(folder)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    direct = build_tokenizer(GGUFFile(path))
    for text in STRINGS:
        expected = direct.encode(text).ids
        assert theirs(text)["input_ids"] == expected, text
        assert ours.encode(text).ids == expected, text
        bare = direct.encode(text, add_special_tokens=False).ids
        assert theirs(text, add_special_tokens=False)["input_ids"] == bare, text


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "gpt-2", "default"])
@pytest.mark.parametrize("text", STRINGS)
def test_text_comes_back(tmp_path: Path, pre: str, text: str) -> None:
    tokenizer = tokenizer_of(tmp_path, pre)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["viking", "", None])
def test_regression_19_an_unknown_pre_tokenizer_is_an_error(
    tmp_path: Path, pre: str | None
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"t.gguf: tokenizer.ggml.pre.*qwen2, smollm"):
        tokenizer_of(tmp_path, pre)


def test_another_tokenizer_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'llama' is not supported, only 'gpt2'"):
        tokenizer_of(tmp_path, model="llama")


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>").ids
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "a", "<think>", "b", "<|im_end|>"]
    assert tokenizer.decode(ids) == "a<think>b"


def test_padding_rows_are_no_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.get_vocab_size() == len(TOKENS)
    assert tokenizer.token_to_id(f"[PAD{len(TOKENS)}]") is None


@pytest.mark.parametrize(
    ("pre", "changes", "first", "last"),
    [
        ("smollm", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("smollm", {"add_bos_token": True}, True, False),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("llama-bpe", {"bos_token_id": None}, False, False),
    ],
)
def test_the_first_and_last_token_are_added_where_the_file_says_so(
    tmp_path: Path, pre: str, changes: dict[str, Any], first: bool, last: bool
) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        tiny_model("llama"),
        pre,
        **{f"tokenizer__ggml__{name}": value for name, value in changes.items()},
    )
    folder = write_config_folder(path, tmp_path / "out")
    a = TOKENS.index("a")
    expected = [BOS] * first + [a] + [EOS] * last
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids == expected
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("a")["input_ids"] == expected
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"]) == (first, last)


def test_transformers_finds_template_and_special_tokens(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))
    theirs = transformers.AutoTokenizer.from_pretrained(write_config_folder(path, tmp_path / "o"))
    assert theirs.chat_template == TEMPLATE
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 0)
    messages = [{"role": "user", "content": "he 12"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>he 12<|im_end|>"


def test_every_end_of_turn_token_ends_an_answer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", "llama", tokenizer_metadata(eot_token_id=5), {})
    # The file's own first, then <|endoftext|> by its name; <|im_start|> never.
    assert generation_config(GGUFFile(path))["eos_token_id"] == [EOS, 5, 0]


def test_a_model_without_an_end_names_none(tmp_path: Path) -> None:
    changes = {"eos_token_id": None, "token_type": [1] * (len(TOKENS) + 2)}
    path = write_gguf(tmp_path / "t.gguf", "llama", tokenizer_metadata(**changes), {})
    assert "eos_token_id" not in generation_config(GGUFFile(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": ["a b c d", "zz"]}, "merge 'zz' is not a pair"),
        ({"merges": ["a qqq"]}, "vocabulary and merges disagree"),
        ({"token_type": [1, 1]}, "tokens, but 2 types"),
        ({"bos_token_id": 99999, "add_bos_token": True}, "bos_token_id 99999 is outside"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_an_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        tokenizer_of(tmp_path, **changes)


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_missing_vocabulary_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"lacks 'tokenizer.ggml.{key}'"):
        tokenizer_of(tmp_path, **{key: None})


# Ids under the pre-tokenizer of the original model (digits one by one, then byte-level BPE) with
# the vocabulary of the file. Without the split of digits "12", "123" and "\n\n7" come out apart.
REAL_IDS = {
    "x  12": [104, 256, 33, 34],
    "\n\n7": [1116, 39],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "日本語 🎉 naïve": [23274, 115, 40993, 179, 120, 248, 15107, 232, 227, 15486, 46494],
    "a\tb\n  c": [81, 197, 82, 3805, 265],
    "½ Ⅷ ٣": [16738, 216, 173, 223, 117, 216, 164, 113],
    "don't we'LL": [12420, 982, 392, 23, 16421],
    "   ": [333],
    "tail  \n": [14332, 32057],
}


@pytest.mark.real_model
def test_regression_19_real_ids(real_model_folder: Path) -> None:
    ours = Tokenizer.from_file(str(real_model_folder / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(real_model_folder)
    for text, ids in REAL_IDS.items():
        assert ours.encode(text).ids == ids, text
        assert theirs(text)["input_ids"] == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.real_model
def test_the_converted_model_knows_the_capital_of_france(real_model_folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(real_model_folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
