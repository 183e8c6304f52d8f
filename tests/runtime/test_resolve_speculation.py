"""``speculative_config``: what users write becomes concrete, or an error that says what to do."""

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError, ModelNotFoundError, UnsupportedModelError
from mini_infer.core.speculative_config import BUILT_IN_METHODS, SpeculativeConfig
from mini_infer.runtime.engine_messages import Loaded
from mini_infer.runtime.resolve import parse_options, resolve_engine
from mini_infer.runtime.resolve_speculation import KINDS, parse_speculation


def resolved(model: Path, value: Any, **options: Any) -> SpeculativeConfig:
    config, _, _ = resolve_engine(
        {"model": str(model), "device": "cpu", "speculative_config": value, **options}
    )
    assert config.speculative_config is not None
    return config.speculative_config


def edited(folder: Path, to: Path, name: str, **changes: Any) -> Path:
    """A copy of a model's folder with some keys of a JSON file changed."""
    shutil.copytree(folder, to)
    content = json.loads((to / name).read_text())
    (to / name).write_text(json.dumps(content | changes))
    return to


@pytest.mark.parametrize("value", [None, "auto"])
def test_nothing_is_no_speculation(tiny_folder: Path, value: Any) -> None:
    assert parse_options({"speculative_config": value})["speculative_config"] is None
    config, _, _ = resolve_engine({"model": str(tiny_folder), "device": "cpu"})
    assert config.speculative_config is None


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}


@pytest.mark.parametrize(
    "value",
    [
        NGRAM,
        json.dumps(NGRAM),
        types.MappingProxyType(NGRAM),
        SpeculativeConfig(**NGRAM),  # type: ignore[arg-type]
        NGRAM | {"num_layers": None},
        NGRAM | {"model": "[ngram]"},
        {"model": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5},
    ],
    ids=str,
)
def test_spellings_of_one_configuration(tiny_folder: Path, value: Any) -> None:
    config = resolved(tiny_folder, value)
    assert config == SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=5
    )


@pytest.mark.parametrize(
    ("value", "method"),
    [
        ({"method": "eagle", "model": "x"}, "head"),
        ({"method": "mtp", "model": "x"}, "head"),
        ({"model": "x"}, "draft_model"),
        ({"model": Path("x")}, "draft_model"),
        ({"method": "draft_model", "model": "x"}, "draft_model"),
        ({"method": "early_exit", "num_layers": 1}, "early_exit"),
    ],
    ids=str,
)
def test_methods_and_their_other_names(value: dict[str, Any], method: str) -> None:
    said = parse_speculation(value)
    assert said is not None
    assert said["method"] == method
    assert said.get("model") in ("x", None)
    assert parse_speculation(said) == said


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ngram", 'is not valid JSON .*: it must be like {"method": "ngram"'),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", r"must be a JSON object such as .*, got \[1\]"),
        ("null", "must be a JSON object"),
        (4, "must be a JSON object such as .*, got 4"),
        ({}, "needs a method: ngram, draft_model, early_exit, head, or your own"),
        ({"num_speculative_tokens": 4}, "needs a method"),
        ({"method": "ngrams"}, "no method 'ngrams': did you mean 'ngram'"),
        ({"method": "medusa"}, "no method 'medusa': there are ngram, draft_model"),
        ({"method": 3}, "method must be a string, got 3"),
        ({"method": "ngram", "num_speculative_token": 4}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "zzz": 4}, "no key 'zzz': there are method,"),
        ({"method": "ngram", 3: 4}, "no key 3"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "must be an integer, got '4'"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be an integer, got True"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "must be an integer, got 2.0"),
        ({"method": "ngram", "adaptive": 1}, "adaptive must be true or false, got 1"),
        ({"method": "head", "model": ["x"]}, "model must be a string"),
        ({"method": "head", "model": "x", "prompt_lookup_max": 3}, "max is of ngram, not of head"),
        ({"method": "ngram", "model": "x"}, "model is of draft_model and head, not of ngram"),
        ({"method": "ngram", "num_layers": 2}, "num_layers is of early_exit, not of ngram"),
        ({"model": "x", "num_layers": 2}, "num_layers is of early_exit, not of draft_model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_read(value: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        parse_options({"speculative_config": value})


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = SCALARS | st.sampled_from([*BUILT_IN_METHODS, "a:b"]) | st.lists(SCALARS, max_size=2)


@given(st.dictionaries(st.sampled_from([*KINDS, "on_device", "x"]), VALUES, max_size=4))
def test_whatever_is_said_is_understood_or_refused(value: dict[str, Any]) -> None:
    try:
        said = parse_speculation(value)
    except InvalidConfigError:
        with pytest.raises(InvalidConfigError, match="speculative_config"):
            parse_speculation(json.dumps(value))
    else:
        assert said is not None
        assert parse_speculation(json.dumps(value)) == said == parse_speculation(said)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "between 1 and 16, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "between 1 and 16, got 17"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min must be at least 1"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_min must be at least 1"),
        ({"method": "early_exit", "num_layers": 0}, "num_layers must be 1 or more"),
        ({"method": "early_exit", "num_layers": 2}, r"num_layers \(2\) must be below .* \(2\)"),
        ({"method": "draft_model"}, "draft_model needs a model"),
        ({"method": "head"}, "head needs a model"),
        ({"method": "no_such_module:Class"}, "can't be loaded: No module named 'no_such_module'"),
        ({"method": "json:NoClass"}, "can't be loaded"),
        ({"method": "json:"}, "no method 'json:': use ngram,"),
        ({"method": ":JSONDecoder"}, "no method ':JSONDecoder': use ngram,"),
        ({"method": "json:JSONDecoder"}, r"lacks propose\(\)"),
    ],
    ids=str,
)
def test_what_cannot_work(tiny_folder: Path, value: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        resolved(tiny_folder, value)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (2, 4)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 9}, (2, 9)),
        ({"prompt_lookup_min": 6}, (6, 6)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 2}, (1, 2)),
    ],
    ids=str,
)
def test_one_length_moves_the_other(
    tiny_folder: Path, given: dict[str, int], lengths: tuple[int, int]
) -> None:
    config = resolved(tiny_folder, {"method": "ngram", **given})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lengths
    assert not config.on_device


@pytest.mark.parametrize(("num_layers", "expected"), [(2, 1), (3, 1), (30, 10)])
def test_a_third_of_the_layers_draft(
    tiny_folder: Path, tmp_path: Path, num_layers: int, expected: int
) -> None:
    folder = edited(tiny_folder, tmp_path / "m", "config.json", num_hidden_layers=num_layers)
    config = resolved(folder, {"method": "early_exit"})
    assert config.num_layers == expected
    assert config.on_device


def test_a_model_of_one_layer_has_no_early_exit(tiny_folder: Path, tmp_path: Path) -> None:
    folder = edited(tiny_folder, tmp_path / "m", "config.json", num_hidden_layers=1)
    with pytest.raises(InvalidConfigError, match="two layers or more"):
        resolved(folder, {"method": "early_exit"})


@pytest.mark.parametrize("on_device", [False, True])
def test_a_class_says_where_it_runs(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    module = types.ModuleType("my_proposers")
    module.Mine = type(  # type: ignore[attr-defined]
        "Mine", (), {"on_device": on_device, "propose": lambda self, *arguments: []}
    )
    monkeypatch.setitem(sys.modules, "my_proposers", module)
    value = {"method": "my_proposers:Mine", "model": "a", "prompt_lookup_max": 3}
    config = resolved(tiny_folder, value)
    assert config.on_device is on_device
    assert (config.model, config.prompt_lookup_max) == ("a", 3)


def test_a_draft_model_brings_its_configuration(tiny_folder: Path) -> None:
    config = resolved(tiny_folder, {"model": str(tiny_folder), "num_speculative_tokens": 2})
    assert (config.method, config.num_speculative_tokens) == ("draft_model", 2)
    assert config.on_device
    assert config.model_config is not None
    assert config.model_config.vocab_size > 1


def test_a_draft_model_that_is_not_there(tiny_folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-draft"):
        resolved(tiny_folder, {"model": "no-such-draft"})


@pytest.mark.parametrize("change", [-8, 8])
def test_padded_vocabularies_of_one_tokenizer(
    tiny_folder: Path, tmp_path: Path, change: int
) -> None:
    """As Qwen 2.5's of 0.5 and of 7 billion parameters are."""
    size = json.loads((tiny_folder / "config.json").read_text())["vocab_size"]
    draft = edited(tiny_folder, tmp_path / "d", "config.json", vocab_size=size + change)
    config = resolved(tiny_folder, {"model": str(draft)})
    assert config.model_config is not None
    assert config.model_config.vocab_size == size + change
    (draft / "tokenizer.json").unlink()
    with pytest.raises(InvalidConfigError, match=f"has {size + change} tokens, the target {size}"):
        resolved(tiny_folder, {"model": str(draft)})


def pieces_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return content


def test_another_tokenizer_says_which_token_differs(tiny_folder: Path, tmp_path: Path) -> None:
    content = pieces_of(tiny_folder)
    added = {token["id"] for token in content["added_tokens"]}
    vocabulary: dict[str, int] = content["model"]["vocab"]
    first, second = [piece for piece, token in vocabulary.items() if token not in added][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    lower = min(vocabulary[first], vocabulary[second])
    draft = edited(tiny_folder, tmp_path / "d", "tokenizer.json", model=content["model"])
    with pytest.raises(InvalidConfigError) as error:
        resolved(tiny_folder, {"model": str(draft)})
    assert f"2 tokens differ, the first of them is {lower}" in str(error.value)
    assert repr(first) in str(error.value)
    assert repr(second) in str(error.value)


def test_a_tokenizer_that_learnt_less(tiny_folder: Path, tmp_path: Path) -> None:
    content = pieces_of(tiny_folder)
    added = {token["id"] for token in content["added_tokens"]}
    vocabulary: dict[str, int] = content["model"]["vocab"]
    last = max(token for token in vocabulary.values() if token not in added)
    content["model"]["vocab"] = {p: token for p, token in vocabulary.items() if token != last}
    draft = edited(tiny_folder, tmp_path / "d", "tokenizer.json", model=content["model"])
    with pytest.raises(InvalidConfigError, match=f"is {last}, none in the draft's"):
        resolved(tiny_folder, {"model": str(draft)})


def test_added_tokens_may_have_other_names(tiny_folder: Path, tmp_path: Path) -> None:
    """As fine-tuning gives them."""
    content = pieces_of(tiny_folder)
    assert content["added_tokens"]
    for token in content["added_tokens"]:
        token["content"] = f"<other {token['id']}>"
    ids = {token["id"] for token in content["added_tokens"]}
    content["model"]["vocab"] = {
        piece: token for piece, token in content["model"]["vocab"].items() if token not in ids
    }
    draft = edited(
        tiny_folder,
        tmp_path / "d",
        "tokenizer.json",
        model=content["model"],
        added_tokens=content["added_tokens"],
    )
    assert resolved(tiny_folder, {"model": str(draft)}).on_device


def test_vocabularies_of_unigram_tokenizers_are_lists(tiny_folder: Path, tmp_path: Path) -> None:
    def with_pieces(name: str, *pieces: str) -> Path:
        model = {"type": "Unigram", "vocab": [[piece, -1.0] for piece in pieces]}
        return edited(tiny_folder, tmp_path / name, "tokenizer.json", model=model, added_tokens=[])

    target, same = with_pieces("t", "a", "b"), with_pieces("s", "a", "b")
    other = with_pieces("o", "a", "c")
    from mini_infer.runtime import resolve

    def resolve_draft(draft: Path) -> EngineConfig:
        options = {"model": str(target), "speculative_config": {"model": str(draft)}}
        config, _ = resolve.resolve_core(options | {"device": "cpu"})
        return config

    assert resolve_draft(same).speculative_config is not None
    with pytest.raises(InvalidConfigError, match=r"is 1, 'c' in the draft's .* and 'b' in"):
        resolve_draft(other)


@pytest.mark.parametrize("model", [None, [], {"vocab": [1]}, {"vocab": {"a": "b"}}], ids=str)
def test_a_tokenizer_without_a_vocabulary(tiny_folder: Path, tmp_path: Path, model: Any) -> None:
    draft = edited(tiny_folder, tmp_path / "d", "tokenizer.json", model=model)
    with pytest.raises(UnsupportedModelError, match="no vocabulary that can be compared"):
        resolved(tiny_folder, {"model": str(draft)})


def test_a_draft_model_must_reach_as_far(tiny_folder: Path, tmp_path: Path) -> None:
    draft = edited(tiny_folder, tmp_path / "d", "config.json", max_position_embeddings=64)
    with pytest.raises(InvalidConfigError, match="context of 64 tokens, max_model_len is 128"):
        resolved(tiny_folder, {"model": str(draft)})
    assert resolved(tiny_folder, {"model": str(draft)}, max_model_len=64).on_device


def test_a_draft_model_takes_its_share_of_the_default_memory(tiny_folder: Path) -> None:
    def memory(**options: Any) -> int:
        config, _, _ = resolve_engine({"model": str(tiny_folder), "device": "cpu", **options})
        assert config.kv_cache_memory is not None
        return config.kv_cache_memory

    twice = memory(speculative_config={"model": str(tiny_folder)})
    assert twice == 2 * memory() == 2 * memory(speculative_config={"method": "ngram"})


@pytest.mark.parametrize(
    "value",
    [{"model": "x"}, {"method": "early_exit"}, {"method": "head", "model": "x"}],
    ids=str,
)
def test_a_dry_run_has_no_weights_to_draft_with(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match="a dry run has none"):
        resolve_engine({"dry_run": True, "speculative_config": value})


def test_a_dry_run_looks_up() -> None:
    config, _, _ = resolve_engine({"dry_run": True, "speculative_config": {"method": "ngram"}})
    assert config.speculative_config == SpeculativeConfig(method="ngram")


@pytest.mark.parametrize(
    "value", [{"method": "early_exit", "num_layers": 1}, {"num_speculative_tokens": 2}], ids=str
)
def test_it_crosses_to_the_engines_process(tiny_folder: Path, value: dict[str, Any]) -> None:
    """As options, and back as the engine's configuration: both ways are their own codec."""
    if "method" not in value:
        value = value | {"model": str(tiny_folder)}
    options = {"model": str(tiny_folder), "device": "cpu", "speculative_config": value}
    config, _, _ = resolve_engine(options)
    assert config.speculative_config is not None
    # ``EngineProcess`` writes what JSON does not know as its text.
    line = json.dumps(options | {"speculative_config": config.speculative_config}, default=str)
    again, _, _ = resolve_engine(json.loads(line))
    assert again == config
    packed = msgspec.msgpack.encode(Loaded(config))
    assert msgspec.msgpack.decode(packed, type=Loaded).config == config
