"""Folders of safetensors, whole and broken."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mini_infer.core.errors import WeightsError
from mini_infer.modeling.safetensors_source import SafetensorsSource
from tests.modeling.fakes import write_shards

TENSORS = {f"t{i}": torch.arange(10.0 * (i + 1)).reshape(i + 1, 10) for i in range(5)}


def check(source: SafetensorsSource) -> None:
    assert set(source.names()) == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.get(name), tensor)


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_single_file(tmp_path: Path, name: str) -> None:
    save_file(TENSORS, tmp_path / name)
    check(SafetensorsSource(tmp_path))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards(tmp_path: Path, count: int) -> None:
    write_shards(tmp_path, TENSORS, count)
    check(SafetensorsSource(tmp_path))


def test_files_without_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS, 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    check(SafetensorsSource(tmp_path))


def test_other_files_beside_the_indexed_shards_are_left_alone(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS, 2)
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    check(SafetensorsSource(tmp_path))


def test_a_tensor_outlives_its_file_handle(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    tensor = SafetensorsSource(tmp_path).get("t4")
    assert torch.equal(tensor, TENSORS["t4"])


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated or corrupt"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("content", [b"\xff" * 64, b"\x08" + b"\0" * 7 + b"not json", b"<html>"])
def test_a_corrupt_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated or corrupt"):
        SafetensorsSource(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    shard = write_shards(tmp_path, TENSORS, 3)[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=f"{shard.name} is truncated"):
        SafetensorsSource(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard = write_shards(tmp_path, TENSORS, 3)[2]
    shard.unlink()
    with pytest.raises(WeightsError, match=f"{shard.name} is missing"):
        SafetensorsSource(tmp_path)


def test_a_file_that_vanishes_after_opening_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors is missing"):
        source.get("t0")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json is not an index"):
        SafetensorsSource(tmp_path)


def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path) -> None:
    first, second = write_shards(tmp_path, TENSORS, 2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    assert content["weight_map"]["t0"] == first.name
    content["weight_map"]["t0"] = second.name
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=f"places t0 in {second.name}"):
        SafetensorsSource(tmp_path)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": dict.fromkeys(TENSORS, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model/outside\.safetensors is missing"):
        SafetensorsSource(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"t0": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match=r"t0 is in both a\.safetensors and b\.safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_checkpoint_is_refused_unopened(tmp_path: Path, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "exploded",))  # type: ignore[return-value]

    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(WeightsError, match="safetensors or GGUF") as error:
        SafetensorsSource(tmp_path)
    assert name in str(error.value)
    assert not (tmp_path / "exploded").exists()


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors"):
        SafetensorsSource(tmp_path)
