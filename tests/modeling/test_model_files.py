"""Locating a model: folder, GGUF file, alias, hub id, and everything that is none of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from mini_infer.core.errors import (
    InvalidConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsError,
)
from mini_infer.modeling import hub, model_files
from mini_infer.modeling.model_cache import cache_folder
from mini_infer.modeling.model_files import ModelFiles, load_model_config, locate_model
from mini_infer.modeling.pull import pull
from tests.modeling.gguf_files import EOS, tiny_model, write_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def snapshot(monkeypatch: pytest.MonkeyPatch, *results: Path | Exception) -> list[dict[str, Any]]:
    """Replaces the Hub's client by one that gives these results in turn; returns its calls."""
    calls: list[dict[str, Any]] = []
    remaining = list(results)

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id} | options)
        result = remaining.pop(0)
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def http_error(kind: type[Exception], message: str) -> Exception:
    """The Hub's HTTP errors need a response; only their type and text matter here."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


def test_a_folder(folder: Path) -> None:
    assert locate_model(str(folder)) == ModelFiles(folder, folder)


def test_a_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate_model("~/model").folder == folder


def test_a_relative_folder_wins_over_alias_and_hub_id(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    folder.rename(folder.parent / "smollm2-135m")
    assert locate_model("smollm2-135m").folder == Path("smollm2-135m")


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        locate_model(str(tmp_path))


def test_a_folder_of_ggufs_says_to_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"to use a\.gguf, give that file itself"):
        locate_model(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_file_that_is_no_gguf(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UnsupportedModelError, match=rf"{name} is neither a \.gguf file nor"):
        locate_model(str(tmp_path / name))


@pytest.mark.parametrize(
    "model", ["", "nonsense", "/no/such/folder", "./x", "a/b/c", "org/m.gguf", "../a", "~/nope"]
)
def test_an_unknown_model_lists_what_is_accepted(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"folder.*\.gguf file.*hub id.*smollm2-135m"):
        locate_model(model)


def test_a_configuration_alone_is_fetched_where_no_weights_are_wanted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = snapshot(monkeypatch, folder)
    assert locate_model("org/name", config_only=True).folder == folder
    assert not any("safetensors" in pattern for pattern in calls[0]["allow_patterns"])
    with pytest.raises(ModelNotFoundError, match="mini-infer pull smollm2-135m fetches it"):
        locate_model("smollm2-135m", config_only=True)


def test_a_gguf_gets_a_light_folder_and_keeps_its_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("qwen3"))
    files = locate_model(str(path))
    assert files.weights == path
    assert files.folder.is_relative_to(tmp_path / "cache")
    assert not list(files.folder.glob("*.safetensors"))
    config = load_model_config(files)
    assert (config.architecture, config.head_dim) == ("Qwen3ForCausalLM", 12)
    assert config.eos_token_ids == (EOS, 0)


def test_a_gguf_that_changed_gets_another_folder(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))
    first = locate_model(str(path)).folder
    assert locate_model(str(path)).folder == first
    write_model(path, tiny_model("qwen2"))
    second = locate_model(str(path))
    assert second.folder != first
    assert load_model_config(second).architecture == "Qwen2ForCausalLM"


def test_a_truncated_gguf(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(WeightsError, match=r"m\.gguf: truncated: tensor"):
        locate_model(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"[1]", "holds a JSON list, not an object"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"{}", "names no 'architectures'"),
        (b'{"architectures": 1}', "names no 'architectures'"),
        (b'{"architectures": "LlamaForCausalLM"}', "names no 'architectures'"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"architectures": ["X"]}', "supported are: LlamaForCausalLM"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "lacks 'num_attention_heads'"),
    ],
)
def test_a_broken_config(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model_config(locate_model(str(folder)))


def test_a_config_that_is_a_folder(folder: Path) -> None:
    (folder / "generation_config.json").mkdir()
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json can't be read"):
        load_model_config(locate_model(str(folder)))


def test_ends_of_sequence_of_both_files_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_model_config(locate_model(str(folder))).eos_token_ids == (2, 7)


def test_looking_at_a_folder_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from mini_infer.modeling.model_files import *;"
        f"load_model_config(locate_model({str(folder)!r}));"
        "sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MINI_INFER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/mini-infer")),
        ({}, Path("/home/me/.cache/mini-infer")),
    ],
)
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: Path
) -> None:
    for name in ("MINI_INFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == expected


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path / "file"))
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))
    with pytest.raises(InvalidConfigError, match=r"can't write to .*MINI_INFER_CACHE"):
        locate_model(str(path))


def complete(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def test_a_hub_model_in_the_cache_needs_no_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = snapshot(monkeypatch, complete(folder))
    assert locate_model("org/name") == ModelFiles(folder, folder)
    assert [call["local_files_only"] for call in calls] == [True]


@pytest.mark.parametrize("lost", ["tokenizer.json", "model.safetensors", None])
def test_an_incomplete_hub_model_is_downloaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lost: str | None
) -> None:
    complete(folder)
    if lost:
        (folder / lost).unlink()
        first: Path | Exception = folder
    else:
        first = hub_errors.LocalEntryNotFoundError("not cached")
    calls = snapshot(monkeypatch, first, folder)
    assert locate_model("org/name").folder == folder
    assert len(calls) == 2


def test_only_what_is_read_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = snapshot(monkeypatch, hub_errors.LocalEntryNotFoundError("not cached"), folder)
    locate_model("org/name")
    read = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    unread = {
        "pytorch_model.bin",
        "modeling_own.py",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "trainer_state.json",
        "original/model.safetensors",
        "original/config.json",
        "consolidated.safetensors",
    }
    patterns = {name: calls[-1][f"{name}_patterns"] for name in ("allow", "ignore")}
    found = filter_repo_objects(
        sorted(read | unread),
        allow_patterns=patterns["allow"],
        ignore_patterns=patterns["ignore"],
    )
    assert set(found) == read


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.LocalEntryNotFoundError("x"), "can't be reached: check the network"),
        (hub_errors.OfflineModeIsEnabled("x"), "not in the local cache"),
        (http_error(hub_errors.RepositoryNotFoundError, "x"), "no such repository"),
        (http_error(hub_errors.GatedRepoError, "x"), "access to it must be granted"),
        (ConnectionError("the line is dead\nand more"), "the line is dead$"),
        (RuntimeError(), "RuntimeError$"),
    ],
)
def test_the_hubs_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    snapshot(monkeypatch, hub_errors.LocalEntryNotFoundError("not cached"), error)
    with pytest.raises(ModelNotFoundError, match=message) as raised:
        locate_model("org/name")
    assert "org/name" in str(raised.value)


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    missing = hub_errors.LocalEntryNotFoundError("not cached")
    snapshot(monkeypatch, missing, missing)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids"):
        locate_model("org/name")


def test_an_invalid_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(monkeypatch, hub_errors.HFValidationError("x"))
    with pytest.raises(ModelNotFoundError, match="'org/na--me' is no valid hub id"):
        locate_model("org/na--me")


def test_a_missing_hub_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFoundError, match="pip install huggingface-hub"):
        locate_model("org/name")


def test_a_hub_model_without_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(monkeypatch, hub_errors.LocalEntryNotFoundError("not cached"), tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        locate_model("org/name")


def test_pull_of_a_folder_gives_the_folder(folder: Path) -> None:
    assert pull(str(complete(folder))) == folder


def test_pull_of_a_gguf_converts_it_once(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))
    folder = pull(str(path))
    assert (folder / "model.safetensors").exists()
    assert pull(str(path)) == folder
    assert locate_model(str(folder)) == ModelFiles(folder, folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pytorch_model.bin", b"", r"pytorch_model\.bin"),
        ("model.safetensors", b"cut", r"model\.safetensors"),
        ("readme", b"", "no .*safetensors"),
    ],
)
def test_pull_of_a_folder_without_sound_weights(
    folder: Path, name: str, content: bytes, message: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        pull(str(folder))
    assert not hub.is_complete(folder)


def test_aliases_are_no_hub_ids() -> None:
    assert not [name for name in model_files.ALIASES if model_files.HUB_ID.fullmatch(name)]
