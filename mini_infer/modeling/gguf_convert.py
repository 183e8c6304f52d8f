"""A GGUF file as a folder in Hugging Face format: config, tokenizer and float32 safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from mini_infer.core.errors import WeightsError
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.gguf_file import GGUFFile
from mini_infer.modeling.gguf_metadata import config_from_gguf
from mini_infer.modeling.gguf_source import GGUFSource
from mini_infer.modeling.gguf_tokenizer import build_tokenizer, generation_config, tokenizer_config
from mini_infer.modeling.hub import has_config_and_tokenizer, is_complete
from mini_infer.modeling.model_cache import write_folder_atomically
from mini_infer.modeling.weights import checkpoint_shapes

SHARD_BYTES = 256 * 2**20
"""Peak memory of a conversion is about two shards, or two of the largest tensor."""


def convert_gguf_to_folder(gguf: Path, folder: Path) -> Path:
    """Writes config.json, tokenizer files and float32 safetensors of ``gguf`` into ``folder``.

    ``folder`` appears only when complete; a complete one is left as it is. Progress goes to
    standard error.

    Raises:
        WeightsError: the file is damaged or holds an unsupported quantisation type.
        UnsupportedModelError: an architecture or tokenizer that is not supported.
        InvalidConfigError: the folder can't be written.
    """

    def write(temporary: Path) -> None:
        config = _write_config_and_tokenizer(GGUFFile(gguf), temporary)
        source = GGUFSource(gguf)
        _check_shapes(gguf, source, checkpoint_shapes(ModelConfig.from_dict(config)))
        _write_weights(source, temporary, gguf.name)

    return write_folder_atomically(folder, write, is_complete)


def write_config_folder(gguf: Path, folder: Path) -> Path:
    """Like ``convert_gguf_to_folder`` without weights: they are read from the GGUF itself."""

    def write(temporary: Path) -> None:
        _write_config_and_tokenizer(GGUFFile(gguf), temporary)

    return write_folder_atomically(folder, write, has_config_and_tokenizer)


def _write_config_and_tokenizer(file: GGUFFile, folder: Path) -> dict[str, Any]:
    config = config_from_gguf(file)
    _write_json(folder / "config.json", config)
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    _write_json(folder / "generation_config.json", generation_config(file))
    return config


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_shapes(gguf: Path, source: GGUFSource, expected: dict[str, tuple[int, ...]]) -> None:
    """A folder that is written must load: no tensor missing, surplus or misshapen."""
    found = {name: source.shape(name) for name in source.names()}
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise WeightsError(
                f"{gguf}: tensor {name} has shape {found.get(name, 'none')}, its metadata asks for "
                f"{expected.get(name, 'none')}"
            )


def _plan_shards(source: GGUFSource) -> list[list[str]]:
    """Names in the file's order, cut where the next tensor would exceed ``SHARD_BYTES``."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name in source.names():
        size = 4 * torch.Size(source.shape(name)).numel()
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _write_weights(source: GGUFSource, folder: Path, label: str) -> None:
    shards = _plan_shards(source)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    num_tensors = sum(len(shard) for shard in shards)
    with tqdm(total=num_tensors, desc=f"converting {label}", unit="tensor") as progress:
        for index, names in enumerate(shards, start=1):
            file_name = "model.safetensors"
            if len(shards) > 1:
                file_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
            tensors = {}
            for name in names:
                tensors[name] = source.get(name).contiguous()
                weight_map[name] = file_name
                total_bytes += tensors[name].nbytes
                progress.update()
            try:
                save_file(tensors, folder / file_name, metadata={"format": "pt"})
            except SafetensorError as error:  # a full disk, in safetensors' words
                raise OSError(str(error)) from None
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
        )
