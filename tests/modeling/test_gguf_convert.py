"""GGUF metadata to config.json, and whole files to folders that transformers loads as well."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mini_infer.core.errors import InvalidConfigError, UnsupportedModelError, WeightsError
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling import gguf_convert, model_cache
from mini_infer.modeling.gguf_convert import convert_gguf_to_folder, write_config_folder
from mini_infer.modeling.gguf_file import GGUFFile
from mini_infer.modeling.gguf_metadata import config_from_gguf
from mini_infer.modeling.gguf_source import GGUFSource
from mini_infer.modeling.safetensors_source import SafetensorsSource
from tests.modeling.gguf_files import (
    BOS,
    EOS,
    MODELS,
    PAD,
    VOCAB_SIZE,
    model_metadata,
    model_tensors,
    tiny_model,
    tokenizer_metadata,
    write_gguf,
    write_model,
)

IDS = torch.tensor([[5, 100, 7, 31, 31, 260, 2, 9, 14, 77]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


def assert_same_model(folder: Path, model: Any, tolerance: float = 1e-5) -> None:
    converted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(converted), logits(model), rtol=tolerance, atol=tolerance)


def written_config(path: Path) -> ModelConfig:
    return ModelConfig.from_dict(config_from_gguf(GGUFFile(path)))


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_is_the_model_to_transformers(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    folder = convert_gguf_to_folder(write_model(tmp_path / "m.gguf", model), tmp_path / "out")
    assert_same_model(folder, model)


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_is_the_model_to_us(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    path = write_model(tmp_path / "m.gguf", model)
    found = written_config(path)
    expected = ModelConfig.from_dict(
        model.config.to_dict() | {"architectures": [type(model).__name__]}
    )
    assert found.bos_token_id == BOS
    assert found.eos_token_ids == (EOS,)
    for field in ("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers"):
        assert getattr(found, field) == getattr(expected, field), field
    for field in ("num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope", "mlp_bias"):
        assert getattr(found, field) == getattr(expected, field), field
    for field in ("tie_word_embeddings", "attention_bias", "sliding_window"):
        assert getattr(found, field) == getattr(expected, field), field
    assert found.max_position_embeddings == expected.max_position_embeddings

    source = GGUFSource(path)
    folder = SafetensorsSource(convert_gguf_to_folder(path, tmp_path / "out"))
    assert set(source.names()) == set(folder.names())
    for tensor in source.names():
        assert torch.equal(source.get(tensor), folder.get(tensor))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_frequencies(parameters: dict[str, Any]) -> torch.Tensor:
    """Hugging Face's own, for the tiny model with these ``rope_parameters``."""
    model = tiny_model("llama", rope_parameters=parameters, max_position_embeddings=131072)
    frequencies: torch.Tensor = model.model.rotary_emb.inv_freq
    return frequencies


@pytest.mark.parametrize("original", [8192, 4096])
def test_llama_3_scaling_is_recovered_from_its_table(tmp_path: Path, original: int) -> None:
    scaling = LLAMA3 | {"original_max_position_embeddings": original, "factor": 32.0}
    plain = rope_frequencies({"rope_type": "default", "rope_theta": 500000.0})
    table = plain / rope_frequencies(scaling)
    model = tiny_model("llama", rope_parameters=scaling, max_position_embeddings=131072)
    tensors = model_tensors(model) | {"rope_freqs.weight": table.numpy()}
    metadata = model_metadata(model) | tokenizer_metadata()
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    rope = written_config(path).rope
    assert rope.rope_type == "llama3"
    # Without a frequency between the two contexts' limits, both describe the same model.
    folder = convert_gguf_to_folder(path, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, rope_frequencies(scaling))
    assert_same_model(folder, model)


def test_a_table_of_ones_is_no_scaling(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = model_tensors(model) | {"rope_freqs.weight": torch.ones(4).numpy()}
    metadata = model_metadata(model) | tokenizer_metadata()
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    assert written_config(path).rope.rope_type == "default"


def test_an_unknown_rotary_table_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = model_tensors(model) | {"rope_freqs.weight": torch.tensor([1, 3, 2, 8.0]).numpy()}
    metadata = model_metadata(model) | tokenizer_metadata()
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight follows no known"):
        written_config(path)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_yarn_scaling(tmp_path: Path, name: str) -> None:
    scaling = {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny_model(name, rope_parameters=scaling)
    path = write_model(
        tmp_path / "m.gguf",
        model,
        **{
            f"{name}.rope.scaling.type": "yarn",
            f"{name}.rope.scaling.factor": 4.0,
            f"{name}.rope.scaling.original_context_length": 32,
        },
    )
    assert written_config(path).rope.rope_type == "yarn"
    assert_same_model(convert_gguf_to_folder(path, tmp_path / "out"), model)


def test_yarn_attention_factor_is_a_multiplier_in_gguf(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        tiny_model("llama"),
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__attn_factor=0.5,
        llama__rope__scaling__yarn_beta_fast=16.0,
    )
    rope = written_config(path).rope
    assert rope.attention_factor == pytest.approx(0.5 * 1.1386294)
    assert rope.beta_fast == 16.0


@pytest.mark.parametrize(
    "keys",
    [
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.5},
        {"llama__rope__scale_linear": 2.5},
    ],
)
def test_linear_scaling(tmp_path: Path, keys: dict[str, Any]) -> None:
    scaling = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}
    model = tiny_model("llama", rope_parameters=scaling)
    path = write_model(tmp_path / "m.gguf", model, **keys)
    assert_same_model(convert_gguf_to_folder(path, tmp_path / "out"), model)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, not the head size 8"),
        ({"llama.attention.value_length": 16}, "value_length is 16, not the head size 8"),
        ({"llama.attention.key_length": 7}, "an even head size"),
        ({"llama.attention.head_count": [4, 2]}, "head_count differs between layers"),
        ({"llama.block_count": None}, "lacks 'llama.block_count'"),
        ({"llama.attention.head_count": 0}, "malformed GGUF metadata"),
        ({"llama.embedding_length": "wide"}, "malformed GGUF metadata"),
        ({"llama.attention.sliding_window": 64}, "sliding window of 64 tokens is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"), **keys)
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_gguf(GGUFFile(path))


def test_a_value_repeated_per_layer_is_one_value(tmp_path: Path) -> None:
    keys = {"llama.attention.head_count": [4, 4], "llama.feed_forward_length": [64, 64]}
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"), **keys)
    config = written_config(path)
    assert (config.num_heads, config.intermediate_size) == (4, 64)


@pytest.mark.parametrize("window", [0, 128, 4096])
def test_a_window_as_long_as_the_context_is_none(tmp_path: Path, window: int) -> None:
    keys = {"llama.attention.sliding_window": window}
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"), **keys)
    assert written_config(path).sliding_window is None


def test_a_file_without_embedding_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = model_tensors(model)
    del tensors["token_embd.weight"]
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(model), tensors)
    with pytest.raises(UnsupportedModelError, match=r"no token embedding \(token_embd.weight\)"):
        config_from_gguf(GGUFFile(path))


def test_float32_metadata_is_read_as_it_was_meant(tmp_path: Path) -> None:
    config = config_from_gguf(GGUFFile(write_model(tmp_path / "m.gguf", tiny_model("llama"))))
    assert config["rms_norm_eps"] == 1e-5  # not 9.999999747378752e-06
    assert config["vocab_size"] == VOCAB_SIZE
    assert config["pad_token_id"] == PAD


def test_a_missing_tensor_is_named_before_anything_is_written(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = model_tensors(model)
    del tensors["blk.1.ffn_up.weight"]
    metadata = model_metadata(model) | tokenizer_metadata()
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    with pytest.raises(WeightsError, match=r"m.gguf: tensor model.layers.1.mlp.up_proj.weight"):
        convert_gguf_to_folder(path, tmp_path / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"), llama__feed_forward_length=96)
    message = r"mlp.gate_proj.weight has shape \(64, 32\), its metadata asks for \(96, 32\)"
    with pytest.raises(WeightsError, match=message):
        convert_gguf_to_folder(path, tmp_path / "out")


def test_shards_stay_small_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "SHARD_BYTES", 20_000)
    model = tiny_model("llama")
    folder = convert_gguf_to_folder(write_model(tmp_path / "m.gguf", model), tmp_path / "out")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert [path.name for path in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    # The embedding alone is larger than a shard; every other file keeps to the limit.
    assert sum(path.stat().st_size > 24_000 for path in shards) == 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert_same_model(folder, model)


def test_nothing_goes_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_gguf_to_folder(write_model(tmp_path / "m.gguf", tiny_model("llama")), tmp_path / "o")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "converting m.gguf" in captured.err


def test_a_light_folder_has_everything_but_weights(tmp_path: Path) -> None:
    folder = write_config_folder(
        write_model(tmp_path / "m.gguf", tiny_model("llama")), tmp_path / "out"
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_convert, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf_to_folder(path, tmp_path / "cache" / "out")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))

    def full(*_: Any, **__: Any) -> None:
        raise gguf_convert.SafetensorError("No space left on device")

    monkeypatch.setattr(gguf_convert, "save_file", full)
    with pytest.raises(InvalidConfigError, match=r"No space left.*MINI_INFER_CACHE"):
        convert_gguf_to_folder(path, tmp_path / "out")


def test_a_finished_folder_is_not_written_again(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))
    folder = convert_gguf_to_folder(path, tmp_path / "out")
    (folder / "config.json").write_text("kept")
    assert convert_gguf_to_folder(path, folder) == folder
    assert (folder / "config.json").read_text() == "kept"


def test_the_first_of_two_conversions_wins(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def write(temporary: Path) -> None:
        (temporary / "mine").touch()
        target.mkdir()  # another process finished meanwhile
        (target / "theirs").touch()

    assert model_cache.write_folder_atomically(target, write, Path.exists) == target
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_put_in_place(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        (tmp_path / "out").touch()  # a file, where the folder should go

    with pytest.raises(InvalidConfigError, match="can't write to"):
        model_cache.write_folder_atomically(tmp_path / "out", write, Path.exists)


def test_two_processes_convert_at_once(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=convert_gguf_to_folder, args=(path, tmp_path / "c" / "out"))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert [item.name for item in (tmp_path / "c").iterdir()] == ["out"]


def test_what_a_killed_run_left_is_removed_after_a_day(tmp_path: Path) -> None:
    abandoned, recent = tmp_path / ".out.old", tmp_path / ".out.new"
    for folder in (abandoned, recent):
        folder.mkdir()
        (folder / "part").touch()
    os.utime(abandoned, (0, 0))
    model_cache.write_folder_atomically(tmp_path / "out", lambda _: None, Path.exists)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.new", "out"]
